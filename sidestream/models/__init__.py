"""Models: files on disk become a `DecoderSpec`, named weights and raw tokenizer data (`loader.load_model`)."""
