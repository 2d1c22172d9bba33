"""Mathematics as GitHub writes it, fenced ```math and inline $`...`$, to MathML when the site is built: no script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r"\$<code>(?P<tex>.*?)</code>\$", re.DOTALL)


def block(source: str, *args: Any, **kwargs: Any) -> str:
    """A fenced formula, as `pymdownx.superfences` asks for it."""
    return f'<div style="overflow-x: auto">{convert(source.strip(), display="block")}</div>'


def on_config(config: Any) -> Any:
    """Give the fence its format: a function of this file cannot be named in mkdocs.yml."""
    fences = [{"name": "math", "class": "math", "format": block}]
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    return config


def on_page_content(content: str, **kwargs: Any) -> str:
    """The page's HTML, each inline formula replaced."""
    return INLINE.sub(lambda found: convert(html.unescape(found["tex"])), content)
