"""One browser window on the demo, seen as a visitor sees it."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
PATIENCE = 60.0  # seconds, on a busy machine
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--force-color-profile=srgb",
)


def start_browser(profile: Path) -> Chrome:
    """A headless Chromium with a profile of its own, that logs its network and its console."""
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    assert binary and driver, "needs chromium and chromedriver: apt-get install chromium chromium-driver"
    options = ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return Chrome(options=options, service=ChromeService(driver))


class Tab:
    """Finds by CSS selector; `text` is what an element holds, exactly."""

    def __init__(self, driver: Chrome):
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 1000, dark: bool = False) -> "Tab":
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)
        self.wait(lambda: self.find("#run") and self.text(".fm-device"))
        return self

    def wait(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def find(self, selector: str) -> Any:
        return next(iter(self.driver.find_elements(By.CSS_SELECTOR, selector)), None)

    def text(self, selector: str) -> str:
        """The text of an element exactly as it is in the page; empty where there is no element."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.textContent : '';"
        return str(self.driver.execute_script(script, selector))

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        element = self.find(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def fill(self, selector: str, text: str) -> None:
        """As a paste: the whole text at once."""
        self._paste(self.find(selector), text)

    def _paste(self, element: Any, text: str) -> None:
        script = (
            "const e = arguments[0]; const kind = e.tagName === 'TEXTAREA' ? HTMLTextAreaElement : HTMLInputElement;"
            "Object.getOwnPropertyDescriptor(kind.prototype, 'value').set.call(e, arguments[1]);"
            "for (const name of ['input', 'change', 'blur']) e.dispatchEvent(new Event(name, {bubbles: true}));"
        )
        self.driver.execute_script(script, element, text)

    def settings(self) -> None:
        """Open the accordion."""
        if not self.find("#check") or not self.find("#check").is_displayed():
            self.click("#settings button")
            self.wait(lambda: self.find("#check") and self.find("#check").is_displayed())

    def fill_labelled(self, label: str, text: str) -> None:
        """The text field of the settings under `label`."""
        for block in self.driver.find_elements(By.CSS_SELECTOR, "#settings label"):
            if block.text.startswith(label):
                return self._paste(block.find_element(By.CSS_SELECTOR, "textarea, input"), text)
        raise AssertionError(f"no field is called {label}")

    def run(self) -> None:
        """Press Run, and see the race begin."""
        before = self.text(".fm-status")
        self.click("#run")
        self.wait(lambda: self.text(".fm-status") != before)

    def finished(self, seconds: float = PATIENCE) -> str:
        """Wait for the end of the race; what the status says then."""
        self.wait(lambda: self.text("#run").strip() == "Run" and not self.find(".fm-spin"), seconds)
        return self.text(".fm-status").strip()

    def shot(self, name: str) -> Path:
        """Save the whole page, however long."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        size = self.driver.execute_script(
            "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def requests(self) -> set[str]:
        """Hosts that the browser has asked since the last call."""
        hosts = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            url = message["params"].get("request", {}).get("url") or message["params"].get("url") or ""
            asked = message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
            if asked and urlsplit(url).scheme in ("http", "https", "ws", "wss"):  # not the browser's own pages
                hosts.add(str(urlsplit(url).hostname))
        return hosts

    def complaints(self) -> list[str]:
        """What the browser's console calls an error."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
