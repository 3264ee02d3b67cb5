"""``kvctl completion``: what a shell needs to complete kvctl's verbs and options."""

import click
from click.shell_completion import get_completion_class

_HINTS = {
    "bash": "kvctl completion bash > /etc/bash_completion.d/kvctl",
    "zsh": 'kvctl completion zsh > "${fpath[1]}/_kvctl"',
    "fish": "kvctl completion fish > ~/.config/fish/completions/kvctl.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_HINTS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """The completion script of SHELL, on standard output.

    Example: kvctl completion bash > /etc/bash_completion.d/kvctl
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(made(ctx.find_root().command, {}, "kvctl", "_KVCTL_COMPLETE").source())
