#!/usr/bin/env bash
# The whole pipeline from nothing: the target writes prompts, answers them, and a drafter learns to foresee the answers.
#
#   bash examples/reproduce.sh                                  SmolLM2-135M-Instruct, 1.5 million tokens, 8 hours
#   OUT=runs/mine TARGET=org/model MINUTES=240 bash examples/reproduce.sh
#   PROMPTS=prompts.jsonl TEST_PROMPTS=test.jsonl ...           your own prompts; others to measure on
#
# Every stage resumes: run the same command again after a stop. On several GPUs, put `accelerate launch` before the
# training (docs/training.md).
set -euo pipefail

TARGET=${TARGET:-smollm2-135m-instruct}
OUT=${OUT:-runs/smollm2-135m}
TOKENS=${TOKENS:-1500000}
MINUTES=${MINUTES:-480}
DTYPE=${DTYPE:-auto}               # of the target in every stage; float32 where tokens must repeat to the last one
PROMPTS=${PROMPTS:-}                # empty: the target writes NUM_PROMPTS of them
NUM_PROMPTS=${NUM_PROMPTS:-12000}
TEST_PROMPTS=${TEST_PROMPTS:-}      # empty: the target writes them, with another seed
RESPOND_ARGS=${RESPOND_ARGS:-}
# what docs/experiments.md, section 14, found best; hide-share 1: trained for rejection, not for shared noise
TRAIN_ARGS=${TRAIN_ARGS:---layers 3 --block-size 4 --window 4 --transition-rank 64 --kl 0.5 --cross-entropy 0.5 --hide-share 1}
EVALUATE_ARGS=${EVALUATE_ARGS:---limit 64 --timed}
CARD_ARGS=${CARD_ARGS:---license apache-2.0}   # for a target in a folder: --base-model org/model too
FLASHMAP=${FLASHMAP:-flashmap}

mkdir -p "$OUT"
if [ -z "$PROMPTS" ]; then
    PROMPTS=$OUT/prompts.jsonl
    $FLASHMAP prompts --target "$TARGET" --num-prompts "$NUM_PROMPTS" --out "$PROMPTS" --dtype "$DTYPE"
fi
if [ -z "$TEST_PROMPTS" ]; then
    TEST_PROMPTS=$OUT/test_prompts.jsonl
    $FLASHMAP prompts --target "$TARGET" --num-prompts 200 --seed 1 --out "$TEST_PROMPTS" --dtype "$DTYPE"
fi
# shellcheck disable=SC2086  # several arguments each
{
    $FLASHMAP respond --target "$TARGET" --prompts "$PROMPTS" --out "$OUT/answers" --max-tokens "$TOKENS" --dtype "$DTYPE" $RESPOND_ARGS
    $FLASHMAP features --target "$TARGET" --answers "$OUT/answers" --out "$OUT/features" --dtype "$DTYPE"
    $FLASHMAP train --target "$TARGET" --features "$OUT/features" --out "$OUT/run" --max-minutes "$MINUTES" $TRAIN_ARGS
    $FLASHMAP evaluate --target "$TARGET" --drafter "$OUT/run/drafter" --prompts "$TEST_PROMPTS" --dtype "$DTYPE" $EVALUATE_ARGS
}
# shellcheck disable=SC2086
$FLASHMAP card --folder "$OUT/run/drafter" $CARD_ARGS
echo "Ready: $OUT/run/drafter"
