"""Open the demo in a browser: a prompt of yours, plain decoding and FlashMap side by side, with live numbers."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from flashmap_hf.demo.page import STYLE, build, theme
from flashmap_hf.demo.theatre import Theatre
from flashmap_hf.devices import DTYPES
from flashmap_hf.options import option


@dataclass(frozen=True)
class Options:
    """Where the demo listens, and what it opens with.

    Raises:
        ValueError: a value is out of range; names it.
    """

    port: int | None = option(None, "where to listen (default: the first free one from 7860 on)")
    host: str | None = option(None, "address to listen at; 0.0.0.0: all (default: this machine only)")
    share: bool = option(False, "also open a public link through Gradio's servers; whoever has it can load models")
    target: str = option("", "the target that the page opens with (default: the embedded one)")
    drafter: str = option("", "the drafter that the page opens with (default: the one trained for the embedded target)")
    dtype: str = option("auto", "of both models; auto: the device's fastest")

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"port must be from 1 to 65535, not {self.port}")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {self.dtype!r}")


def main(options: Options) -> None:
    """Serve until interrupted."""
    launch(build(Theatre(options.target, options.drafter, options.dtype)), options)


def launch(page: gr.Blocks, options: Options, **more: Any) -> None:
    """Start the server; nothing is sent to anybody but the browsers that ask.

    Raises:
        OSError: the port is taken.
    """
    page.launch(
        share=options.share,
        server_name=options.host,
        server_port=options.port,
        theme=theme(),
        css_paths=STYLE,
        footer_links=[],
        run_history=False,  # else every prompt is kept in the browser
        ssr_mode=False,
        pwa=False,
        enable_monitoring=False,
        mcp_server=False,
        **more,
    )
