"""What a plan cannot do, and whose fault it is."""


class PlanError(ValueError):
    """The plan cannot be made; the text is one line for the person who asked, and names the way out."""


class UnknownArchitectureError(PlanError):
    """The config names a kind of layer whose cache this module does not know.

    Fails closed: a guess of "full attention" would be off twofold to tenfold, and nobody would see it.
    """
