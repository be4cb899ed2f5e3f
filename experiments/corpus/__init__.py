"""Text on its way to a model: read (`sources`), cut into tokens (`tokenisers`), packed and kept (`packed`, `cache`)."""
