"""Pure adapters: an engine's text and JSON -> samples; its routes and names, as data per engine."""
