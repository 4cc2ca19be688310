"""The tiny trained pair, made from source: corpus, models, training, export and simulation (README.md in this folder)."""
