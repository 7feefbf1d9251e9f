"""The files of a head's folder. Who only moves heads about needs no more, and loads no torch."""

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "drafter_card.json"
