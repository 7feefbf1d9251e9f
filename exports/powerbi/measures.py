"""All measures of the semantic model."""

from exports.powerbi.measures_cost import COST, ENERGY, MACHINE
from exports.powerbi.measures_latency import LATENCIES
from exports.powerbi.measures_traffic import SPECULATION, VOLUME
from exports.powerbi.measures_trust import EQUALITY, QUALITY

MEASURES = (*VOLUME, *SPECULATION, *LATENCIES, *COST, *ENERGY, *MACHINE, *EQUALITY, *QUALITY)
BY_NAME = {measure.name: measure for measure in MEASURES}
