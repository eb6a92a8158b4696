"""Sources of guesses, one file each, behind the two methods of `base.Drafter`."""
