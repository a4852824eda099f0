#!/usr/bin/env bash
# protperf's whole story at a size for two CPU cores: real proteins -> shards -> a trained model -> numbers -> embeddings.
#   bash docs/demo.sh FOLDER        (`make demo` installs first and uses the folder demo)
# DEMO_OPTIONS holds further options of `protperf train`, for example trainer.max_steps=100.
set -euo pipefail
folder=${1:?usage: demo.sh FOLDER}
run=$folder/runs/demo
sample=$(python -c 'from importlib.resources import files; print(files("data_prep") / "sample/uniprot_sample.fasta.gz")')
started=$SECONDS
stages=6
number=0

stage() { # what it does, what it leaves, then the command
    local title=$1 left=$2 begun=$SECONDS
    shift 2
    number=$((number + 1))
    printf '\n== %d of %d: %s\n$ %s\n' $number $stages "$title" "$*"
    if [ -e "$left" ]; then echo "$left is there already."; else "$@"; fi
    printf -- '-- %d s\n' $((SECONDS - begun))
}

verdict() { # the model's perplexity on the test split beside the floor
    python - "$folder/scores.json" << 'END'
import sys
from pathlib import Path

from protperf.formats.scores import read_scores

test = read_scores(Path(sys.argv[1]))["test"]
model, unigram = test["model"]["perplexity"], test["unigram"]["perplexity"]
told = "below" if model < unigram else "not below"
print(f"The model: perplexity {model:.2f} on test proteins that it never saw; counting residues gets {unigram:.2f}. It is {told} that line.")
END
}

echo "protperf $(protperf --version): 2,800 real proteins through all of it, into $folder/: about 5 minutes on two cores, no network."
echo "Where others compute, too, it may take far longer; OMP_NUM_THREADS=1 helps. After Ctrl-C the same command goes on."
if [ -e "$folder/map.png" ]; then
    echo "Removing the last demo in $folder/ first."
    rm -rf "$folder"/{shards,runs,embeddings.h5,embeddings.h5.skipped.tsv,scores.json,curve.png,map.png}
fi
mkdir -p "$folder"

stage "clean, split, shuffle and pack 2,800 UniProt records into windows of 512 tokens" "$folder/shards/manifest.json" \
    protperf prepare --sample "$folder/shards" --window 512 --valid 0.05 --test 0.05

stage "train a 4-layer Performer to fill in masked residues (the longest stage)" "$run/model/model.safetensors" \
    protperf train experiment=demo data.path="$folder/shards" run_dir="$run" ${DEMO_OPTIONS:-}

stage "how good is it? perplexity of residues that it has not seen (20 is guessing, lower is better), beside what counting gets" "$folder/scores.json" \
    protperf evaluate "$run" "$folder/shards" --json "$folder/scores.json"

stage "one vector for each protein" "$folder/embeddings.h5" \
    protperf embed "$run" "$sample" "$folder/embeddings.h5"

stage "the training curve" "$folder/curve.png" \
    protperf plot curve "$run" "$folder/curve.png" --scores "$folder/scores.json"

stage "the proteins on a map" "$folder/map.png" \
    protperf plot map "$folder/embeddings.h5" "$folder/map.png"

printf '\nDone in %d s. ' $((SECONDS - started))
verdict
cat << END

$folder/ holds
  curve.png, map.png   to look at: perplexity against steps; the proteins, coloured by organism
  embeddings.h5        a vector for each protein, under its id
  scores.json          the table of stage 3
  runs/demo/           the run: metrics.csv, train.log, checkpoints/; model/ in it is the model as a folder to share, with its card
  shards/              the dataset; report.html in it shows what became of every record

Next, with proteins of your own (activate the environment first if \`protperf\` is not found: source .venv/bin/activate)
  protperf embed $run my_proteins.fasta my_proteins.h5
  protperf prepare my_proteins.fasta my_shards --window 1024 --valid 0.05 --test 0.05
  protperf train data.path=my_shards name=mine model=tiny data.batch_size=2
README.md, the pages in docs/ (their \`runs/demo\` is there after \`cd $folder\`) and \`protperf COMMAND --help\` tell the rest.
END
