"""``python -m kvctl.sim``: the simulated engine on a port, until it is stopped."""

import click
import uvloop

from kvctl.sim.lifetime import stop_event
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer


async def _serve(server: SimServer, host: str, port: int, *, with_stdin: bool) -> None:
    stop = stop_event(with_stdin=with_stdin)
    await server.start(host, port)
    click.echo(f"simulated engine: {server.url}")
    await stop.wait()
    await server.close()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: any free port; it is printed.")
@click.option("--model", default="sim", show_default=True, help="Name under which the model is served.")
@click.option("--profile", type=click.Choice(sorted(PROFILES)), default="8b-24g", show_default=True)
@click.option(
    "--blocks", default=3000, show_default=True, help="Blocks of the KV pool; one is the null block."
)
@click.option("--block-size", default=16, show_default=True, help="Tokens in a block.")
@click.option("--max-model-len", default=8192, show_default=True, help="Context length in tokens.")
@click.option("--max-num-seqs", default=256, show_default=True)
@click.option("--max-num-batched-tokens", default=2048, show_default=True)
@click.option("--prefix-caching/--no-prefix-caching", default=False, show_default=True)
@click.option("--keep-responses", is_flag=True, help="Store /v1/responses, and generate in the background.")
@click.option("--with-stdin", is_flag=True, help="Stop when standard input ends.")
@click.option("--seed", default=1, show_default=True, help="Decides answer lengths that no request says.")
def main(
    *,
    host: str,
    port: int,
    model: str,
    profile: str,
    blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    keep_responses: bool,
    seed: int,
    with_stdin: bool,
) -> None:
    """Serve a simulated engine over HTTP."""
    config = EngineConfig(
        profile=PROFILES[profile],
        blocks=blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
    )
    server = SimServer(config, model=model, seed=seed, keeps_responses=keep_responses)
    uvloop.run(_serve(server, host, port, with_stdin=with_stdin))


if __name__ == "__main__":
    main()
