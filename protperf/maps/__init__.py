"""`protperf maps`: where a model looks, which amino acids are alike to it, and which residues it says touch."""
