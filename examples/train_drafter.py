"""Train a drafter for your own model, from a file of prompts alone: answers, features, training, measurement, card.

python examples/train_drafter.py --target org/model --prompts prompts.jsonl --out runs/model --max-minutes 240

Every stage goes on where it was stopped, so the same command resumes. The same in the shell: `examples/reproduce.sh`.
"""

import argparse
from pathlib import Path

from flashmap_hf import hub_card
from flashmap_hf.evaluation import acceptance
from flashmap_hf.training import features, respond, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct", help="embedded name, folder or Hub id")
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL rows with "prompt"; or `flashmap prompts`')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-minutes", type=float, default=240.0)
    parser.add_argument("--max-tokens", type=int, default=1_500_000, help="response tokens to train on")
    parser.add_argument("--base-model", help="Hub id of the target, for the card of one in a folder")
    args = parser.parse_args()

    answers, stored, drafter = args.out / "answers", args.out / "features", args.out / "run" / "drafter"
    respond.main(respond.Options(prompts=args.prompts, out=answers, target=args.target, max_tokens=args.max_tokens))
    features.main(features.Options(answers=answers, out=stored, target=args.target))
    train.main(
        train.Options(
            out=args.out / "run",
            target=args.target,
            features=[stored],
            max_minutes=args.max_minutes,
            layers=3,
            block_size=4,
        )
    )
    acceptance.main(
        acceptance.Options(prompts=args.prompts, drafter=str(drafter), target=args.target, limit=32, timed=True)
    )
    hub_card.main(hub_card.Options(folder=drafter, license="apache-2.0", base_model=args.base_model))
    print(f"Ready: FlashMapDrafter.from_pretrained({str(drafter)!r})")


if __name__ == "__main__":
    main()
