"""The calibration pass: second moments of inputs, costs of formats, and their allocation."""
