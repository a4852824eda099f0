"""What a trained model is asked: embeddings, likelihoods, new sequences, where it looks. Torch and numpy, no files."""
