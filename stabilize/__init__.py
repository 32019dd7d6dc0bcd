"""Train deep encoder-decoder Transformers; what keeps them stable is a choice in YAML."""
