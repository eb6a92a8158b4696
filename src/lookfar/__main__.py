"""`python -m lookfar`, and `torchrun -m lookfar`: the command line."""

from lookfar.cli import main

if __name__ == "__main__":
    main()
