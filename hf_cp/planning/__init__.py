"""What a training step needs and takes, on paper: `hf-cp plan`. Needs neither a GPU nor the model."""
