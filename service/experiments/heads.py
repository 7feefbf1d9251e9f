"""The heads that a server takes from the registry, and what their names stand for now."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.config import HeadSource
from engine.drafter.registry import HeadRegistry, RegistryError
from engine.request import SpeculationMode, SpeculationParams

_PREFIX = "head:"
_DRAFT_MODEL = "draft_model"


def reference_of(drafter: str) -> str | None:
    """NAME or NAME@VERSION of the drafter "head:NAME..."; None for any other."""
    return drafter[len(_PREFIX) :] if drafter.startswith(_PREFIX) else None


@dataclass(frozen=True, slots=True)
class DrafterNames:
    """What names of drafters stand for.

    versions: "head:NAME" or "head:NAME@VERSION" -> the engine's drafter "head:NAME@VERSION".
    default: of requests that name none; None leaves them to the engine.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    default: tuple[str, ...] | None = None

    def resolved(self, wanted: SpeculationParams) -> SpeculationParams:
        """The same with the engine's names. A request keeps the version that it began with."""
        if wanted.mode is SpeculationMode.OFF:
            return wanted
        drafter, drafters = wanted.drafter, wanted.drafters
        if drafter is None and drafters is None:
            drafters = self.default
        if drafters is not None:
            drafters = tuple(dict.fromkeys(self.versions.get(name, name) for name in drafters))
        if drafter is not None:
            drafter = self.versions.get(drafter, drafter)
        return replace(wanted, drafter=drafter, drafters=drafters)

    @property
    def all(self) -> tuple[str, ...]:
        """Names that requests may give beside the engine's."""
        return tuple(name for name, version in self.versions.items() if name != version)


@dataclass(frozen=True, slots=True)
class WantedHeads:
    """sources: by the engine's name of the drafter, what there should be."""

    names: DrafterNames
    sources: Mapping[str, HeadSource] = field(default_factory=dict)


class RegisteredHeads:
    """Resolves references. configured: NAME or NAME@VERSION that are always wanted. default:
    drafters of requests that name none, where a head of the registry is among them."""

    def __init__(
        self,
        registry: HeadRegistry | None = None,
        configured: Sequence[str] = (),
        default: tuple[str, ...] | None = None,
    ) -> None:
        self._registry = registry
        self._configured = tuple(configured)
        self._default = default

    def wanted(
        self, drafters: Iterable[str] = (), without: frozenset[str] = frozenset()
    ) -> WantedHeads:
        """What is configured and `drafters`, as the registry says now; those of `without` are
        the engine's own. Raises RegistryError naming the head."""
        names = [f"{_PREFIX}{reference}" for reference in self._configured]
        names += [n for n in (*(self._default or ()), *drafters) if reference_of(n) is not None]
        versions: dict[str, str] = {}
        sources: dict[str, HeadSource] = {}
        for name in dict.fromkeys(names):
            if name in without:
                continue
            source = self._find(name[len(_PREFIX) :])
            versions[name] = f"{_PREFIX}{source.name}"
            versions[versions[name]] = versions[name]
            sources[versions[name]] = source
        return WantedHeads(DrafterNames(versions, self._own_default(without)), sources)

    def _own_default(self, own: frozenset[str]) -> tuple[str, ...] | None:
        """What of the default the engine has: the shipped head fits some targets only, and a
        draft model is the engine's own last choice, whether it is named or not."""
        if self._default is None:
            return None
        found = [name for name in self._default if reference_of(name) is not None or name in own]
        if _DRAFT_MODEL in own and _DRAFT_MODEL not in found:
            found.append(_DRAFT_MODEL)
        return tuple(found)

    def _find(self, reference: str) -> HeadSource:
        if self._registry is None:
            raise RegistryError(f"heads.{reference}: this server has no registry")
        try:
            found = self._registry.resolve(reference)
            folder = self._registry.folder_of(found.name, found.version)
        except RegistryError as error:
            raise RegistryError(f"heads.{reference}: {error}") from error
        return HeadSource(f"{found.name}@{found.version}", str(folder))
