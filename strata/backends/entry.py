"""Fast calls of programs whose arguments are on the device: addresses are set, kernels are launched.

They are for plans of fixed sizes whose steps all run on the device. Everything that stays the same is prepared once; if
something has changed, a fast call returns None, and the caller takes the general path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strata.backends.base import Entry
from strata.backends.recipe import Recipe, Sequenced, room_for
from strata.backends.resident import DeviceArray, DeviceBlock
from strata.errors import OutOfMemoryError

if TYPE_CHECKING:
    from strata.backends.offload import OffloadExecutable


def entry_of(owner: OffloadExecutable, recipe: Recipe, outputs: Sequence[str]) -> Entry | None:
    """The entry of a recipe that was run before; None where there is none."""
    if len(recipe.parts) != 1 or recipe.results != tuple(outputs) or recipe.kept_places is None:
        return None
    (part,) = recipe.parts
    if not isinstance(part, Sequenced) or recipe.needed != tuple(range(len(recipe.inputs))):
        return None
    home, who, version = owner.home, owner.lir.name, owner._version
    lock, take, returned, put_back = owner.driver.lock, home.take, home.ledger.returned, home.put_back
    place_of, play, submit = owner.driver.place, owner.driver.player(part.made), owner.driver.submit
    noted, expect = owner.noted(recipe), home.expect
    rooms, kept = recipe.rooms, recipe.kept_places[1]
    made_of = tuple((room_for(int(t.nbytes)), t.dtype.np, t.static_shape) for t in recipe.result_types)
    give = returned.append
    new: Any = object.__new__

    def enter(arrays: Sequence[Any], over: Mapping[int, DeviceArray] | None) -> list[DeviceArray] | None:
        with lock:
            if owner._version is not version:
                return None
            given = []
            for a in arrays:
                if type(a) is not DeviceArray or a.home is not home:
                    return None
                given.append(a.place)
            scratch: list[Any] = []
            try:
                for room in rooms:
                    scratch.append(take(room, who))
                places = [place_of(buffer) for buffer, _ in scratch] + given if rooms else given
                results = []
                for i, (room, dtype, shape) in enumerate(made_of):
                    array = None if over is None else over.get(i)
                    if array is None:
                        buffer = None
                        if returned:  # as a rule the last result of this very program
                            buffer, size, owed = returned.popleft()
                            if size != room or owed is not who:
                                put_back(buffer, size, owed)
                                buffer = None
                        if buffer is None:
                            buffer, _ = take(room, who)
                        array, block = (
                            new(DeviceArray),
                            new(DeviceBlock),
                        )  # their __init__ would take half a microsecond
                        block.buffer, block.room, block.who, block.give = buffer, room, who, give
                        array.home, array.dtype, array.shape, array.block = home, dtype, shape, block
                        array.place, array.source = place_of(buffer), None
                    results.append(array)
                    places.append(array.place)
                play(places + kept if kept else places)
                if noted:
                    expect(noted)
                submit()
            except OutOfMemoryError:
                return None  # the long way tells what is large
            finally:
                for buffer, room in scratch:
                    give((buffer, room, who))
            return results

    return enter
