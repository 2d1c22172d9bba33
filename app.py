"""The demo as a Hugging Face Space, and as `python app.py` or `gradio app.py` anywhere else."""

from flashmap_hf.demo.command import Options, launch
from flashmap_hf.demo.page import build
from flashmap_hf.demo.theatre import Theatre

demo = build(Theatre())

if __name__ == "__main__":
    launch(demo, Options())
