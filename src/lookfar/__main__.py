"""`python -m lookfar`, and `torchrun -m lookfar`: the command line."""

from lookfar.cli import main

main()
