"""python -m service.demo"""

import typer

from service.demo.command import demo

typer.run(demo)
