"""The commands. Each verb lives in a module of its own that is imported only when it is used."""
