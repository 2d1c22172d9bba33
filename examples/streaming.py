"""Read the text while it is made, in another thread: as a server does. A step may bring several tokens at once.

python examples/streaming.py "Explain tides to a child."
"""

import argparse
import time
from threading import Thread
from typing import Any

from transformers import TextIteratorStreamer

from flashmap_hf import FlashMapDrafter, drafters, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Explain tides to a child.")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--drafter", help="folder or Hub id; default: the one trained for the embedded target")
    parser.add_argument("--stop", help="end the answer at this text")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()

    drafter = FlashMapDrafter.from_pretrained(args.drafter or drafters.default_drafter(args.target))
    target: Any  # type checkers do not see the `generate` of a PreTrainedModel
    target, tokenizer = targets.load(args.target)
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "streamer": streamer}
    if args.stop:
        options |= {"stop_strings": [args.stop], "tokenizer": tokenizer}
    failed: list[Exception] = []

    def work() -> None:
        try:
            target.generate(**inputs, **options, assistant_model=drafter)
        except (ValueError, RuntimeError) as error:
            failed.append(error)
            streamer.end()  # else the reader below would wait for ever

    started = time.perf_counter()
    worker = Thread(target=work)
    worker.start()
    pieces = 0
    for piece in streamer:
        pieces += piece != ""
        print(piece, end="", flush=True)
    worker.join()
    if failed:
        raise failed[0]
    print(f"\n{pieces} pieces in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
