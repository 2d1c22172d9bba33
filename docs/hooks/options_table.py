"""`<!-- options: module.Class -->` in a page becomes the table of that dataclass's options, read from its source."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- options: (?P<module>[\w.]+)\.(?P<name>\w+) -->")


def table(module: str, name: str) -> str:
    """One row per field made with `option(default, help)`."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    rows = ["| option | default | what it is for |", "|---|---|---|"]
    for field in found.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
            call, keywords = field.value, {keyword.arg: keyword.value for keyword in field.value.keywords}
            default = ast.unparse(call.args[0]) if call.args else "none" if "factory" in keywords else "required"
            text = ast.literal_eval(call.args[1] if len(call.args) > 1 else keywords["help"])
            flag = ast.unparse(field.target).replace("_", "-")
            rows.append(f"| `--{flag}` | `{default}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page's text with its tables in it."""
    return MARK.sub(lambda found: table(found["module"], found["name"]), markdown)
