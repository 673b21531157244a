"""Keys, values and listed words, from our own lists of English adjectives and nouns.

RULER takes them from the package ``wonderwords``; lists in the source give the same words on every machine.
"""

import random
import string
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from shadowkv.errors import RequestError

Kind = Literal["numbers", "words", "uuids"]

_ADJECTIVES = """
able acid agile airy alert alpine amber ample ancient antique apt arctic arid artful astral autumn avid azure
bare basic blank bleak blithe blonde blunt boiling bold bony bouncy brainy brash brave brief bright brisk broad
bronze bubbly bulky bumpy buoyant burly bushy busy calm candid careful casual cheap cheery chic chilly chubby
civic clean clear clever cloudy clumsy coarse coastal cold comic compact complex cool coral cosmic cosy crafty
creamy crimson crisp crude cubic curly curved cyan dainty damp dapper daring dark dashing deep deft delicate
dense devout dim direct distant dizzy domestic double dreamy dry dual dusky dusty eager early earnest earthy
eastern easy elastic elated elder elegant empty endless epic equal exact exotic expert faint fair faithful
famous fancy fast fearless feisty fertile festive fierce fiery final firm fixed flat fleet floral fluent fluffy
focal fond formal frail frank free fresh friendly frosty frugal full funny fuzzy gallant gentle genuine giant
giddy gifted gilded glad gleaming global glossy golden good graceful grand granite grassy grateful grave gray
great green gritty groovy guarded gusty handy happy hardy harsh hasty hazy heavy hidden hollow honest humble
hungry icy ideal idle immense inner intact ivory jade jaunty jolly jovial juicy junior keen kind lanky large
lasting late lavish lazy leafy lean legal lemon level light likely limber linear liquid little lively local
lofty lone long loud lovely loyal lucid lucky lunar lush magenta magic major marine massive mature meek mellow
merry mighty mild minor misty mobile modern modest moist moral mossy muddy murky musical mute narrow nautical
neat nimble noble noisy northern novel oaken oblong odd olive open orange ornate outer oval pale paper patient
peaceful peppy perky placid plain playful plucky plump polar polite posh prime proud prudent purple quaint quick
quiet radiant rapid rare ready regal rigid ripe robust rocky roomy rosy rough round rowdy royal ruby rugged
rural rustic rusty sandy scarlet secret sedate serene shady sharp shiny short shy silent silken silky silver
simple sincere sleek slender slim slow small smart smoky smooth snappy snowy sober soft solar solemn solid sonic
spare speedy spicy spiral spotless spry square stable stark steady steep stern sticky still stout strict strong
sturdy subtle sunny superb supple sure sweet swift tactful tall tame tangy tart tawny tender tepid thick thin
thorny tidal tidy tiny topaz tough tranquil trim tropic true trusty upbeat upper urban useful vacant valid vast
velvet verbal vernal vibrant violet vivid vocal wandering warm wary watery wavy western whole wide wild wily
windy winged wintry wiry wise witty wooden woolly wry yellow young zany zealous zesty
"""

_NOUNS = """
acorn actor airport almond anchor ankle answer anvil apple apron arcade arch armour arrow artist atlas attic
author avenue awning badge bagel baker balcony ballad balloon bamboo banjo banner barley barn barrel basin
basket beacon beaver bell bench berry bicycle birch bishop bison blanket blossom boulder bracelet branch brick
bridge broom bucket buckle buffalo bugle burrow button cabin cable cactus camel camera canal candle canoe canvas
canyon caravan cargo carpet carrot cart castle cathedral cavern cedar cellar cello chair chalk channel chapel
chapter cheese cherry chess chest chimney chisel church cider cinema circle circus citadel clarinet cliff clinic
cloak clock clover coach cobbler coconut coffee collar comet compass concert copper cottage cotton cougar
courier cousin cradle crane crater crayon cricket crocus crown crystal cupboard curtain cushion cypress dairy
dancer dawn deer desert desk diamond dinner doctor dolphin donkey dragon drawer drum duck eagle easel echo
eclipse elbow elephant elm embassy emerald engine envelope estuary fabric factory falcon farmer feather fence
fern ferry festival fiddle field finch fisherman flag flame flute forest forge fossil fountain fox frigate
furnace galaxy gallery garden garlic garnet gate gazelle geyser ginger giraffe glacier glove goblet goose gorge
granary grape guitar gull hammer hammock harbour harp harvest hawk hazel hedge helmet heron highway hill hinge
honey horizon hornet horse hostel hotel house husky island jacket jaguar jasmine jersey jewel journal journey
judge jungle juniper kayak kennel kettle keyboard kingdom kitchen kite kiwi knight ladder lagoon lake lamp
lantern larch laurel lawyer ledger leopard letter lettuce library lily linen lion lizard lobster locket lodge
lotus lynx magnet magpie mango mansion maple marble market marsh mast meadow medal melody melon mermaid meteor
midnight mill miner mirror mitten monastery monkey monument moon moose morning mosaic moth motor mountain museum
mushroom mustard napkin narwhal necklace needle nest nettle notebook novelist nurse nutmeg oasis ocean octopus
office onion orchard orchid organ osprey otter oven owl oyster paddle painter palace panda pantry parade parcel
parrot parsley pasture pavement peach peacock pebble pelican pencil penguin pepper petal pharmacy piano picnic
pigeon pillow pilot pine pirate pitcher planet plaza plough plum pocket poet pond pony poplar poppy porch
portrait potter prairie printer puffin pulley pumpkin puppet puzzle pyramid quail quarry quartz queen quill
quilt rabbit raccoon radish raft railway rainbow raisin ranger raven reef ribbon river robin rocket rooster rope
saddle saffron sailor salmon sandal satchel saucer school schooner scissors sculptor seal season seaweed shadow
shepherd shield shore shovel shrine signal singer sketch sledge sloth snail sofa soldier sonnet sparrow spider
spinach spindle spire sponge spruce squirrel staircase starling station statue steamer stork storm stove street
sultan summer summit sunset swallow swan sycamore symbol table tailor tavern teacher teapot temple terrace
theatre thimble thistle thunder ticket tiger timber tomato torch tower tractor trader trail trumpet tulip tundra
tunnel turbine turnip turtle tutor twilight umbrella uncle unicorn vale valley vase village vine vineyard viola
violin volcano wagon waiter walnut walrus warden waterfall weaver whale wheat wheel whistle willow window winter
wizard wolf wombat workshop wren yacht yard zebra zeppelin
"""


ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())


def number(rng: random.Random) -> str:
    """Seven digits, the first not zero."""
    return str(rng.randrange(10**6, 10**7))


def word(rng: random.Random) -> str:
    """``adjective-noun``."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def identifier(rng: random.Random) -> str:
    """A version 4 UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


MAKERS: dict[Kind, Callable[[random.Random], str]] = {"numbers": number, "words": word, "uuids": identifier}


def distinct(make: Callable[[random.Random], str], rng: random.Random, count: int) -> list[str]:
    """``count`` of them, no two the same."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def letters(rng: random.Random, count: int, width: int, alphabet: str = string.ascii_lowercase) -> list[str]:
    """``count`` different strings of random letters.

    Raises:
        RequestError: there are not that many.
    """
    if count > len(alphabet) ** width // 2:
        raise RequestError(f"{count} different words of {width} letters were asked for; there are too few")
    return distinct(lambda one: "".join(one.choices(alphabet, k=width)), rng, count)


def listed(rng: random.Random, count: int, vocabulary: Sequence[str] | None = None) -> list[str]:
    """``count`` different words for a list, in random order.

    Without a vocabulary they are our single words, and compounds ``adjective-noun`` where those do not suffice.

    Raises:
        RequestError: the vocabulary is too small.
    """
    if vocabulary is not None:
        if count > len(vocabulary):
            raise RequestError(
                f"{count} different words are needed and the list has {len(vocabulary)}; give a longer one"
            )
        return rng.sample(list(vocabulary), count)
    single = [*ADJECTIVES, *NOUNS]
    if count <= len(single):
        return rng.sample(single, count)
    if count - len(single) > len(ADJECTIVES) * len(NOUNS) // 2:
        raise RequestError(f"{count} different words are needed; give a word list for contexts of this length")
    words = single + distinct(word, rng, count - len(single))
    rng.shuffle(words)
    return words
