"""The page: its widgets, and which of them starts what."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from flashmap_hf import drafters, targets
from flashmap_hf.demo import panes
from flashmap_hf.demo.controls import MOST_TOKENS
from flashmap_hf.demo.example_prompts import EXAMPLES
from flashmap_hf.demo.theatre import OWN, STEPS, Theatre, shown
from flashmap_hf.generation_config import Verification

STYLE = Path(__file__).with_name("page.css")
VISITORS = 16  # whose races may wait at once; further ones wait in the queue of gradio
INTRO = (
    '<header class="fm-intro"><h1>FlashMap</h1><p>The same text from your model, in fewer steps: a small network '
    "drafts the next block of tokens, your model checks the block in one pass and keeps what it would have "
    "written itself.</p>"
    "</header>"
)
FAIR = (
    '<p class="fm-note">How the race is run: both sides share one device and take turns, one target step at a time; '
    "the turn goes to the side that has used less of the device. So each pane fills at about half its real pace, and "
    "their ratio is the true one. Every time and speed is on the side's own clock.</p>"
)
NUMBER_DRAFTS = "(on) => { document.body.classList.toggle('fm-numbers', on); return []; }"


def build(theatre: Theatre) -> gr.Blocks:
    """The page of `theatre`."""
    with gr.Blocks(title="FlashMap", analytics_enabled=False, fill_width=False) as page:
        html_block(INTRO)
        device = html_block("", elem_id="device")
        prompt, run, stop = prompt_row()
        chosen = [prompt, *settings(theatre)]
        check = chosen.pop()
        empty = shown(None, None, "", "", "")
        status = html_block(empty[0], elem_id="status")
        board = html_block(empty[1], elem_id="board")
        with gr.Row(elem_id="panes", equal_height=True):
            plain_head, plain_text = pane("plain", "Plain text", empty[2])
            flash_head, flash_text = pane("flashmap", "FlashMap text", empty[4])
        with gr.Row(elem_id="legend"):
            html_block(panes.legend())
            numbers = gr.Checkbox(False, label="Number the drafts", elem_id="numbers", container=False)
        report = html_block("", elem_id="report")
        html_block(FAIR)

        outputs = [status, board, plain_head, plain_text, flash_head, flash_text, report, run, stop]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        started = gr.on(
            [run.click, prompt.submit],
            follow(theatre),
            chosen,
            outputs,
            concurrency_limit=VISITORS,
            trigger_mode="once",
            **quiet,
        )
        stop.click(theatre.stop, None, None, queue=False, **quiet)
        numbers.change(None, numbers, None, js=NUMBER_DRAFTS)
        for event in (page.load, check.click, started.then):
            event(theatre.device, chosen, device, **quiet)
        page.unload(theatre.stop)
    return page


def follow(theatre: Theatre) -> Any:
    """`theatre.run` in the shape that gradio calls: one parameter per widget, then the request."""

    def run(
        prompt: Any, target: Any, drafter: Any, block: Any, steps: Any, temperature: Any, rule: Any,
        adaptive: Any, tree: Any, tokens: Any, seed: Any, request: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        values = (prompt, target, drafter, block, steps, temperature, rule, adaptive, tree, tokens, seed)
        yield from theatre.run(*values, request=request)

    return run


def prompt_row() -> tuple[gr.Textbox, gr.Button, gr.Button]:
    first = next(iter(EXAMPLES["Chat"].values()))
    with gr.Row(elem_id="ask", equal_height=True):
        prompt = gr.Textbox(first, label="Prompt", lines=3, max_lines=10, scale=5, info="Shift+Enter runs it")
        with gr.Column(scale=1, min_width=150, elem_id="buttons"):
            run = gr.Button("Run", variant="primary", elem_id="run")
            stop = gr.Button("Stop", variant="secondary", elem_id="stop")
    with gr.Row(elem_id="examples"):
        for category, examples in EXAMPLES.items():
            with gr.Row(elem_classes="fm-category"):
                html_block(f'<span class="fm-lead">{category}</span>')
                for name, text in examples.items():
                    button = gr.Button(name, size="sm", min_width=0)
                    button.click(lambda text=text: text, None, prompt, queue=False, api_visibility="private")
    return prompt, run, stop


def settings(theatre: Theatre) -> list[Any]:
    """The widgets in the order of `controls`, and the button that asks whether the models fit."""
    block_size = theatre.block_size()
    with gr.Accordion("Models and settings", open=False, elem_id="settings"):
        with gr.Row():
            target = gr.Textbox(theatre.target_name, label="Target", info="embedded name, Hub id or folder")
            drafter = gr.Textbox(
                theatre.drafter, label="Drafter", placeholder=drafters.DEFAULTS[targets.SMOLLM2.name],
                info="Hub id or folder; empty: the one trained for the embedded target",
            )  # fmt: skip
            check = gr.Button("Do they fit?", size="sm", min_width=120, scale=0, elem_id="check")
        with gr.Row():
            tokens = gr.Slider(1, MOST_TOKENS, 96, step=1, label="Max tokens")
            temperature = gr.Slider(0.0, 2.0, 0.0, step=0.05, label="Temperature", info="0 is greedy")
            block = gr.Slider(1, 16, block_size, step=1, label="K, tokens per block", info="at most the drafter's own")
        with gr.Row():
            steps = gr.Radio(list(STEPS), value=OWN, label="Flow steps")
            rule = gr.Dropdown(
                list(get_args(Verification)), value="auto", label="Sampling rule", info="when temperature is above 0"
            )
            with gr.Column(min_width=160, elem_id="how"):
                adaptive = gr.Checkbox(True, label="Adaptive", info="each step chooses; K and the tree do not count")
                tree = gr.Checkbox(False, label="Draft a tree", info="instead of a chain")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, info="of the sampling")
    return [target, drafter, block, steps, temperature, rule, adaptive, tree, tokens, seed, check]


def html_block(value: str, **options: Any) -> gr.HTML:
    """HTML of our own making, without the looks and the scripts that gradio adds to it."""
    return gr.HTML(value, apply_default_css=False, js_on_load=None, **options)


def pane(name: str, label: str, head: str) -> tuple[gr.HTML, gr.HTML]:
    """Head and text of one side; the text is the only thing inside its frame, so that it can grow piece by piece."""
    with gr.Column(min_width=300, elem_classes="fm-pane", elem_id=f"pane-{name}"):
        title = html_block(head)
        frame = f'<div class="fm-text" tabindex="0" role="region" aria-label="{label}">${{value}}</div>'
        text = html_block("", html_template=frame, elem_id=f"text-{name}", autoscroll=True, max_height=460)
    return title, text


def theme() -> gr.themes.Base:
    """Fonts of the system only: nothing is fetched. Grey text and buttons are darker than usual, to be read easily."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
    base = gr.themes.Base(
        primary_hue="teal",
        neutral_hue="slate",
        font=[gr.themes.Font(name) for name in fonts],  # a mere name would be looked for on the server
        font_mono=[gr.themes.Font(name) for name in mono],
        radius_size="md",
    )
    return base.set(
        body_text_color_subdued="*neutral_500",
        block_info_text_color="*neutral_500",
        block_label_text_color="*neutral_600",
        block_title_text_color="*neutral_600",
        input_placeholder_color="*neutral_500",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_cancel_background_fill="#b91c1c",
        button_cancel_background_fill_hover="#991b1b",
        button_cancel_text_color="white",
        button_cancel_background_fill_dark="#b91c1c",
        button_cancel_background_fill_hover_dark="#dc2626",
        button_cancel_text_color_dark="white",
    )
