"""The report's pages, in order."""

from exports.powerbi.pages_machine import MACHINE_PAGES
from exports.powerbi.pages_traffic import TRAFFIC_PAGES

PAGES = (*TRAFFIC_PAGES, *MACHINE_PAGES)
