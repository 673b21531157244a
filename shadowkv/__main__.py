"""``python -m shadowkv`` is the ``shadowkv`` command."""

from shadowkv.cli.app import main

main()
