"""Trains drafters: data, features, distillation, the variational objective, evaluation."""
