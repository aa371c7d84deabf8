"""Several machines share one engine: their ranks, the links between them, and their flags."""
