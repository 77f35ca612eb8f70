"""Text: tokenizer, chat template, incremental detokenizer and stop strings. Imports neither torch nor transformers."""
