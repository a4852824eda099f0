#!/usr/bin/env bash
# protperf's whole story at a size for two CPU cores: real proteins -> shards -> a trained model -> numbers -> embeddings.
#   bash docs/demo.sh FOLDER        (`make demo` installs first and uses the folder demo)
# DEMO_OPTIONS holds further options of `protperf train`, for example trainer.max_steps=100.
set -euo pipefail
folder=${1:?usage: demo.sh FOLDER}
sample=$(python -c 'from importlib.resources import files; print(files("data_prep") / "sample/uniprot_sample.fasta.gz")')
started=$SECONDS

stage() { # what it does, then the command
    local title=$1 begun=$SECONDS
    shift
    printf '\n== %s\n$ %s\n' "$title" "$*"
    "$@"
    printf -- '-- %d s\n' $((SECONDS - begun))
}

if [ -e "$folder" ]; then
    echo "removing the last demo in $folder"
    rm -rf "$folder"/{shards,run,embeddings.h5,embeddings.h5.skipped.tsv,scores.json,curve.png,map.png}
fi
mkdir -p "$folder"

stage "Clean, split, shuffle and pack 2,800 UniProt records into windows of 512 tokens" \
    protperf prepare --sample "$folder/shards" --window 512 --valid 0.05 --test 0.05

stage "Train a 4-layer Performer to fill in masked residues" \
    protperf train experiment=demo data.path="$folder/shards" run_dir="$folder/run" ${DEMO_OPTIONS:-}

stage "How good is it? Held-out perplexity beside what counting residues gets" \
    protperf evaluate "$folder/run" "$folder/shards" --json "$folder/scores.json"

stage "One vector for each protein" \
    protperf embed "$folder/run" "$sample" "$folder/embeddings.h5"

stage "The training curve" \
    protperf plot curve "$folder/run" "$folder/curve.png" --scores "$folder/scores.json"

stage "The proteins on a map" \
    protperf plot map "$folder/embeddings.h5" "$folder/map.png"

printf '\n%s holds:\n' "$folder"
ls "$folder" "$folder/run"
printf 'all stages: %d s\n' $((SECONDS - started))
