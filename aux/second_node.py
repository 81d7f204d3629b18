"""Print how much faster two nodes are than one, from a step's time and the network, before the job.

    python aux/second_node.py --weights 124e6 --step-ms 61 --busbw 20
    python aux/second_node.py --weights 350e6 --step-ms 300 --busbw 10 --ranks 8 --bf16-gradients

docs/second_node.html computes and draws the same in a browser, and docs/05_a_second_node.md says
where the numbers come from. It needs no torch.
"""

import argparse


def second_node(
    weights: float, step: float, busbw: float, ranks: int, number: int = 4
) -> dict[str, float]:
    """The milliseconds of a step of DDP, and how many times as fast two nodes are as one, if each
    GPU keeps its batch.

    `step` is that of one node, in ms. `busbw` is in GB/s, over all `ranks` of both nodes, as
    check_ranks.py and nccl-tests define it (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). A
    gradient has `number` bytes. The backward pass takes twice as long as the forward pass, and
    sends while it computes (arxiv.org/abs/2006.15704).
    """
    sent = number * weights * 2 * (ranks - 1) / ranks / (busbw * 1e6)
    backward = step * 2 / 3
    both = step - backward + max(backward, sent)
    faster = 2 * step / both
    return {"sent": sent, "backward": backward, "both": both, "faster": faster}


def positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--weights", type=positive, required=True, metavar="N", help="that are trained: 25.6e6")
    add("--step-ms", type=positive, required=True, metavar="MS", help="of a step on one node")
    help = "GB/s on the bus between the nodes, from check_ranks.py"
    add("--busbw", type=positive, required=True, metavar="GB/S", help=help)
    help = "of both nodes together (default: 16)"
    add("--ranks", type=int, default=16, metavar="N", help=help)
    add("--bf16-gradients", action="store_true", help="two bytes for each, instead of four")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks is at least 2, one on each node")

    number = 2 if args.bf16_gradients else 4
    found = second_node(args.weights, args.step_ms, args.busbw, args.ranks, number)
    print(
        f"The gradients take {found['sent']:.1f} ms, and the backward pass {found['backward']:.1f},"
        f" so a step takes {found['both']:.1f} ms on two nodes.\n"
        f"Two nodes are {found['faster']:.2f} times as fast as one, for"
        f" {2 / found['faster']:.2f} times the GPU-hours."
    )
    if found["faster"] < 1.5:
        print("Run two jobs of one node each.")


if __name__ == "__main__":
    main()
