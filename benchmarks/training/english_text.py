"""Words and sentences of the English tasks, each list with a part for training and one for tests.

No word, name or template of one part is in the other. Templates name their subject `{s}` and their
object `{o}`; a subject can be a name or a phrase such as "the leader of Project Heron".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.quality.types import Split


@dataclass(frozen=True, slots=True)
class Parts:
    train: tuple[str, ...]
    test: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        return self.train if split is Split.TRAIN else self.test


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What a subject has one of, and how that is said and asked."""

    subject: str  # a kind of name
    object: str
    statements: Parts
    questions: Parts
    phrases: Parts  # the object by its subject, to ask on from there
    descriptions: Parts  # the subject by its object, to ask for a passage


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A statement about the subject of the document before it, and a question that needs it."""

    subject: str
    object: str
    statements: Parts  # `{thing}` becomes the kind of the subject
    questions: Parts


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


CITIES = Parts(
    _names(
        "Lisbon, Oslo, Vienna, Prague, Dublin, Madrid, Athens, Warsaw, Berlin, Rome, Paris, Geneva,"
        "Boston, Chicago, Denver, Seattle, Toronto, Montreal, Lima, Bogota, Cairo, Nairobi, Lagos,"
        "Delhi, Mumbai, Beijing, Shanghai, Tokyo, Osaka, Seoul, Manila, Jakarta, Sydney, Perth,"
        "Hamburg, Munich, Lyon, Milan, Naples, Turin, Porto, Bergen, Malmo, Riga, Tallinn, Vilnius,"
        "Krakow, Gdansk, Seville, Valencia, Granada, Bilbao, Marseille, Bordeaux, Basel,"
        "Bern, Salzburg, Graz, Dresden, Leipzig, Bremen, Stuttgart, Antwerp, Ghent, Utrecht,"
        "Rotterdam, Aarhus, Turku, Belgrade, Sofia, Ankara, Izmir, Haifa, Tunis, Accra,"
        "Dakar, Durban, Kampala, Karachi, Lahore, Kabul, Hanoi, Kyoto, Nagoya, Busan, Taipei,"
        "Brisbane, Auckland, Calgary, Ottawa, Quebec, Portland, Austin, Memphis, Nashville, Tampa,"
        "Miami, Detroit, Cleveland, Quito, Caracas, Recife, Rosario, Cordoba"
    ),
    _names(
        "Helsinki, Zurich, Budapest, Brussels, Stockholm, Florence, Venice, Dallas, Houston,"
        "Phoenix, Baltimore, Havana, Santiago, Istanbul, Bangkok, Singapore, Melbourne, Glasgow,"
        "Leeds, Cologne, Amsterdam, Barcelona, Copenhagen, Edinburgh, Bristol, Liverpool,"
        "Vancouver, Pittsburgh, Atlanta, Orlando, Bucharest, Moscow, Baghdad, Tehran, Colombo,"
        "Casablanca"
    ),
)
PROJECTS = Parts(
    _words(
        "Falcon Heron Osprey Kestrel Merlin Harrier Condor Plover Sparrow Starling Raven Magpie "
        "Granite Marble Quartz Basalt Amber Cobalt Copper Silver Meadow River Canyon Harbor "
        "Lantern Anchor Compass Beacon Bridge Tunnel Comet Meteor Saturn Neptune Mercury Jupiter "
        "Tiger Leopard Lynx Wolf Bison Antelope Gazelle Dolphin Salmon Sturgeon Coral Lagoon "
        "Island Delta Prairie Forest Desert Tundra Volcano Crater Boulder Pebble Ember Torch "
        "Candle Mirror Hammer Anvil Arrow Shield Saddle Ladder Wagon Rocket Kite Sail Rudder "
        "Violet Crimson Scarlet Indigo Ivory Ebony Velvet Linen Cotton Silk Clover Thistle Fern "
        "Moss Birch Aspen Poplar Hazel Walnut Almond Lemon Saffron Ginger Pepper Cinnamon"
    ),
    _words(
        "Badger Otter Beaver Walrus Panther Cedar Willow Juniper Maple Thunder Glacier Avalanche "
        "Horizon Pioneer Voyager Summit Eclipse Orchid Tulip Jasmine Monsoon Cyclone Pyramid "
        "Castle Fortress Cathedral Pelican Albatross Penguin Buffalo Stallion Cobra Viper Topaz "
        "Emerald Sapphire"
    ),
)
FIRST_NAMES = Parts(
    _words(
        "Anna Boris Clara David Elena Frank Greta Hugo Irene Jonas Karen Louis Maria Nils Olga "
        "Peter Rosa Simon Tina Victor Wanda Yusuf Zoe Adam Bella Carl Dora Emil Fiona George "
        "Hannah Ivan Jack Kate Leo Mona Noah Olivia Paul Quentin Rachel Samuel Teresa Ursula "
        "Vera William Xavier Yvonne Aaron Beth Colin Diana Edgar Flora Gavin Heidi Isaac Joan "
        "Kevin Lydia Marcus Nadia Owen Paula Ralph Sandra Tobias Valerie Wendy Amir Chloe Dennis "
        "Esther Fatima Gustav Ingrid Joseph Kamal Leila Miguel"
    ),
    _words(
        "Martin Laura Thomas Julia Henry Alice Oscar Sophie Daniel Emma Lucas Nora Felix Ruth "
        "Walter Grace Arthur Helen Stefan Monica Brian Carmen Philip Sarah Robert Linda Edward "
        "Claire Patrick Susan"
    ),
)
LAST_NAMES = Parts(
    _words(
        "Berg Costa Novak Silva Weber Moreau Rossi Jensen Kovacs Haas Lind Marsh Patel Okafor "
        "Tanaka Reyes Doyle Frost Barnes Quinn Adler Brandt Chavez Dunn Ellis Flynn Garcia Holt "
        "Ibsen Janssen Keller Lopez Meyer Nagy Ortega Popov Ramos Sato Torres Unger Vidal Walsh "
        "Yamada Zeman Archer Bishop Cooper Dalton Evans Foster Gibson Hunter Irving Jordan Kerr "
        "Lambert Mason Norton Parker Russell"
    ),
    _words(
        "Fischer Nielsen Castro Murphy Hayes Romero Schmidt Olsen Carter Singh Bauer Wolfe Dubois "
        "Ferrari Hansen Kowalski Lehmann Morales Petrov Richter Sullivan Turner Vargas Watson"
    ),
)
COMPANY_FIRST_WORDS = Parts(
    _words(
        "North Blue Iron Green Royal Alpine Grand Stone Golden Rapid Star Bright Clear Eastern "
        "Western Upper First Global Modern Noble Polar Quick Red Solid True United Urban White "
        "Central Coastal Metro Nordic Valley Garden Ocean Arctic Atlas Apex Orbit Vector"
    ),
    _words(
        "Crystal Pacific Summer Liberty Prime Titan Winter Spring Southern Diamond "
        "Eagle Harvest Imperial Lunar Majestic Nova Sunrise"
    ),
)
COMPANY_LAST_WORDS = Parts(
    _words("Works Systems Motors Foods Energy Labs Trading Textiles Supply Tools Logistics Media"),
    _words("Industries Partners Holdings Group Brothers Ventures"),
)
INSTRUMENTS = Parts(
    _names(
        "violin, piano, guitar, flute, cello, trumpet, harp, drums, clarinet, organ, banjo, horn,"
        "lute, fiddle, recorder, xylophone, double bass, keyboard, bagpipes, cornet"
    ),
    _names(
        "saxophone, accordion, trombone, oboe, mandolin, viola, bassoon, harmonica, tuba, ukulele,"
        "harpsichord, tambourine, sitar, piccolo"
    ),
)
PRODUCTS = Parts(
    _names(
        "bicycles, cameras, furniture, batteries, tractors, carpets, candles, helmets, pumps,"
        "lamps, boots, kettles, windows, tents, doors, shirts, gloves, radios, printers, bottles,"
        "knives, wheels, ropes, curtains, pencils, pillows, tables, chairs, ovens, fans, bricks,"
        "pipes, cables, magnets, scales, jackets, hats, belts, rings, towels, boats, trailers,"
        "motors, filters, valves, screws, cheese, bread, chocolate, coffee, honey, paint, soap,"
        "glass"
    ),
    _names(
        "turbines, mirrors, sensors, umbrellas, mattresses, elevators, toys, engines, blankets,"
        "clocks, ladders, drones, watches, baskets, buttons, telescopes, wallets, shovels, tiles,"
        "paper, perfume, butter, tea"
    ),
)
SYLLABLES = _words(
    "ba be bo da de do fa fe ga go ka ke ki la le li lo ma me mi mo na ne no pa pe ra re ri ro sa "
    "se so ta te to va ve vi za zo tra bri sto kel mar dun fen gri hol jas lin nor pel qui ros"
)

FILLERS = Parts(
    (
        "The office handles routine matters such as travel and supplies.",
        "Staff are asked to keep their records up to date.",
        "A short report is sent to the board once a month.",
        "The weather was mild for most of the spring.",
        "Several visitors asked about the opening hours.",
        "The annual meeting was held without any delays.",
        "A small fee applies to late requests.",
        "The building was painted last summer.",
        "Most of the paperwork is now handled online.",
        "New chairs were ordered for the meeting rooms.",
        "The parking area is closed on Sundays.",
        "The newsletter is printed on recycled paper.",
        "Nobody raised any objections during the review.",
        "An audit is planned for the end of the year.",
        "Lunch is served between noon and two.",
        "The committee thanked everyone for their patience.",
        "The old archive was moved to the basement.",
        "A second survey will follow in the autumn.",
        "Training sessions take place every other week.",
        "The budget has not changed since last year.",
        "Some of the rooms still lack a proper number.",
        "Keys have to be returned before the weekend.",
        "The coffee machine on the second floor works again.",
        "Questions can be left in the box near the stairs.",
        "A summary of the talks will appear next month.",
        "The roof was checked after the storm.",
        "Older files are kept for seven years.",
        "The next holiday falls on a Thursday.",
        "Everyone received a printed copy of the rules.",
        "The lights in the corridor go off at nine.",
        "Travel costs are paid back within thirty days.",
        "It rained for three days in a row.",
        "The canteen offers two warm meals a day.",
        "A map of the area hangs beside the door.",
        "The schedule may change at short notice.",
        "Badges must be worn at all times.",
        "The survey was answered by about half of the readers.",
        "A few details are still open.",
        "The window in the hall needs a new frame.",
        "Complaints have become rare.",
        "The first draft was longer than expected.",
        "Deliveries arrive at the back entrance.",
        "The phone lines were busy all morning.",
        "Two trees were planted in front of the school.",
        "The exhibition attracted a large crowd.",
        "Snow delayed some of the trains.",
        "The list is updated every Friday.",
        "Copies can be ordered by mail.",
        "The plan was discussed at length.",
        "No changes are expected before June.",
    ),
    (
        "The reception desk is staffed on weekdays only.",
        "Minutes of the last session are available on request.",
        "Guests may use the terrace behind the main house.",
        "All invoices must be signed by two people.",
        "The library extended its hours during the holidays.",
        "Some of the equipment is due to be replaced soon.",
        "The heating system was repaired in January.",
        "Volunteers helped to clean up after the event.",
        "A new carpet was laid in the waiting room.",
        "The speech lasted for nearly an hour.",
        "Tickets were sold out within a few minutes.",
        "The elevator is out of order this week.",
        "Her notes were written in blue ink.",
        "The river rose slightly after the rain.",
        "Dinner was followed by a short walk.",
        "Most letters are answered within ten days.",
        "The fence along the road was removed.",
        "A spare key hangs in the kitchen.",
        "The figures will be checked once more.",
        "Several shelves are still empty.",
    ),
)

RELATIONS: Mapping[str, Relation] = {
    "base": Relation(
        subject="project",
        object="city",
        statements=Parts(
            (
                "{s} is based in {o}.",
                "The headquarters of {s} are in {o}.",
                "{s} operates out of {o}.",
                "The team behind {s} works in {o}.",
                "{o} is the home of {s}.",
                "Work on {s} takes place in {o}.",
                "The office of {s} stands in the middle of {o}.",
            ),
            (
                "{s} is located in {o}.",
                "The main site of {s} can be found in {o}.",
                "{o} is where {s} is carried out.",
            ),
        ),
        questions=Parts(
            (
                "In which city is {s} based?",
                "Where is {s} based?",
                "Which city hosts {s}?",
                "What is the home city of {s}?",
                "Where does the team of {s} work?",
            ),
            ("In what city is {s} located?", "Where can {s} be found?"),
        ),
        phrases=Parts((), ()),
        descriptions=Parts(
            ("a project in {o}", "a project based in {o}", "the project from {o}"),
            ("a project located in {o}", "a project with its site in {o}"),
        ),
    ),
    "leader": Relation(
        subject="project",
        object="person",
        statements=Parts(
            (
                "{s} is led by {o}.",
                "{o} is the manager of {s}.",
                "The head of {s} is {o}.",
                "{o} has been running {s} since last year.",
                "Responsibility for {s} lies with {o}.",
                "{o} was made the leader of {s}.",
                "{s} is managed by {o}.",
            ),
            (
                "{o} is in charge of {s}.",
                "The person leading {s} is {o}.",
                "{s} is under the direction of {o}.",
            ),
        ),
        questions=Parts(
            (
                "Who leads {s}?",
                "Who is the manager of {s}?",
                "Who is the head of {s}?",
                "Who runs {s}?",
                "Who is responsible for {s}?",
            ),
            ("Who is in charge of {s}?", "Who is leading {s}?"),
        ),
        phrases=Parts(
            (
                "the leader of {s}",
                "the manager of {s}",
                "the head of {s}",
                "the person who runs {s}",
                "the person responsible for {s}",
            ),
            ("the person in charge of {s}", "the person leading {s}"),
        ),
        descriptions=Parts(
            ("a project led by {o}", "the project of {o}", "a project managed by {o}"),
            ("a project headed by {o}", "a project directed by {o}"),
        ),
    ),
    "supplier": Relation(
        subject="project",
        object="company",
        statements=Parts(
            (
                "{s} buys its parts from {o}.",
                "{o} is the supplier of {s}.",
                "The supplier of {s} is {o}.",
                "{s} has a contract with the supplier {o}.",
                "{s} gets its material from {o}.",
                "{o} delivers the parts for {s}.",
            ),
            (
                "{o} supplies {s}.",
                "{s} is supplied by {o}.",
                "{s} relies on the supplier {o}.",
            ),
        ),
        questions=Parts(
            (
                "Who is the supplier of {s}?",
                "Which company is the supplier of {s}?",
                "Where does {s} buy its parts?",
                "Who delivers the parts for {s}?",
            ),
            ("Which supplier does {s} use?", "What company supplies {s}?"),
        ),
        phrases=Parts(
            (
                "the supplier of {s}",
                "the company that delivers parts to {s}",
                "the company that sells to {s}",
            ),
            ("the company that supplies {s}", "the supplier used by {s}"),
        ),
        descriptions=Parts(
            ("a customer of {o}", "a project that buys from {o}", "a project with parts from {o}"),
            ("a project supplied by {o}", "a project that relies on {o}"),
        ),
    ),
    "home": Relation(
        subject="person",
        object="city",
        statements=Parts(
            (
                "{s} lives in {o}.",
                "{s} has a house in {o}.",
                "The home of {s} is in {o}.",
                "{s} moved to {o} a few years ago and still lives there.",
                "{s} and two children live in {o}.",
                "{s} rents a flat in {o}.",
            ),
            (
                "{s} resides in {o}.",
                "{s} has lived in {o} for ten years.",
                "{o} is the place where {s} lives.",
            ),
        ),
        questions=Parts(
            (
                "In which city does {s} live?",
                "Where does {s} live?",
                "Which city does {s} live in?",
                "Which city is {s} at home in?",
            ),
            ("In what city does {s} reside?", "Where does {s} reside?"),
        ),
        phrases=Parts((), ()),
        descriptions=Parts(
            ("a person living in {o}", "someone whose home is in {o}", "someone from {o}"),
            ("a person who resides in {o}", "somebody who lives in {o}"),
        ),
    ),
    "instrument": Relation(
        subject="person",
        object="instrument",
        statements=Parts(
            (
                "{s} plays the {o}.",
                "In the evening {s} practices the {o}.",
                "{s} is known for playing the {o}.",
                "The favorite instrument of {s} is the {o}.",
                "{s} is learning to play the {o}.",
                "{s} owns and plays an old {o}.",
            ),
            (
                "{s} has played the {o} since childhood.",
                "At concerts {s} plays the {o}.",
                "The {o} is the instrument that {s} plays.",
            ),
        ),
        questions=Parts(
            (
                "Which instrument does {s} play?",
                "What instrument does {s} play?",
                "What does {s} play?",
                "What is the favorite instrument of {s}?",
            ),
            (
                "Which musical instrument is played by {s}?",
                "What is the instrument of {s}?",
            ),
        ),
        phrases=Parts((), ()),
        descriptions=Parts(
            ("a person who plays the {o}", "someone playing the {o}"),
            ("a musician with the {o}", "somebody who plays the {o}"),
        ),
    ),
    "employer": Relation(
        subject="person",
        object="company",
        statements=Parts(
            (
                "{s} works for {o}.",
                "{s} has a job at {o}.",
                "The employer of {s} is {o}.",
                "{s} joined {o} two years ago.",
                "{s} is an engineer at {o}.",
                "{o} hired {s} in the spring.",
            ),
            (
                "{s} is employed by {o}.",
                "{s} is on the staff of {o}.",
                "{o} employs {s}.",
            ),
        ),
        questions=Parts(
            (
                "Which company does {s} work for?",
                "Who is the employer of {s}?",
                "Where does {s} work?",
                "At which company does {s} have a job?",
            ),
            ("Which company employs {s}?", "By what company is {s} employed?"),
        ),
        phrases=Parts(
            (
                "the employer of {s}",
                "the company where {s} works",
                "the company that hired {s}",
            ),
            ("the company that employs {s}", "the company employing {s}"),
        ),
        descriptions=Parts(
            ("a person who works for {o}", "an engineer at {o}", "someone with a job at {o}"),
            ("a person employed by {o}", "somebody on the staff of {o}"),
        ),
    ),
    "seat": Relation(
        subject="company",
        object="city",
        statements=Parts(
            (
                "{s} has its headquarters in {o}.",
                "{s} is a company from {o}.",
                "The main factory of {s} is in {o}.",
                "The company {s} was founded in {o}.",
                "{s} runs its business from {o}.",
                "The seat of {s} is {o}.",
            ),
            (
                "{s} is a firm based in {o}.",
                "The offices of {s} are in {o}.",
                "The firm {s} is located in {o}.",
            ),
        ),
        questions=Parts(
            (
                "In which city is {s} based?",
                "Where is {s} based?",
                "Which city is home to {s}?",
                "Where are the headquarters of {s}?",
            ),
            ("In what city is {s} located?", "In what city are the offices of {s}?"),
        ),
        phrases=Parts((), ()),
        descriptions=Parts(
            ("a company in {o}", "a company from {o}", "a factory in {o}"),
            ("a firm based in {o}", "a firm with offices in {o}"),
        ),
    ),
    "product": Relation(
        subject="company",
        object="product",
        statements=Parts(
            (
                "{s} makes {o}.",
                "{s} is a maker of {o}.",
                "The company {s} sells {o}.",
                "{s} is known for its {o}.",
                "Stores all over the country sell {o} from {s}.",
                "The factory of {s} turns out {o}.",
            ),
            (
                "{s} produces {o}.",
                "The main product of {s} is {o}.",
                "{s} manufactures {o}.",
            ),
        ),
        questions=Parts(
            (
                "What does {s} make?",
                "Which product does {s} sell?",
                "What is made by {s}?",
                "What is {s} known for?",
            ),
            ("What does {s} produce?", "What is the product of {s}?"),
        ),
        phrases=Parts((), ()),
        descriptions=Parts(
            ("a company that makes {o}", "a maker of {o}", "a company that sells {o}"),
            ("a firm that produces {o}", "a manufacturer of {o}"),
        ),
    ),
    "director": Relation(
        subject="company",
        object="person",
        statements=Parts(
            (
                "The director of {s} is {o}.",
                "{o} is the boss of {s}.",
                "{o} was elected president of {s}.",
                "{s} has a new director, {o}.",
                "{o} sits at the top of {s}.",
                "The president of {s} is called {o}.",
            ),
            (
                "{o} serves as the chief executive of {s}.",
                "The chief executive of {s} is {o}.",
                "{s} has {o} as its chief.",
            ),
        ),
        questions=Parts(
            (
                "Who is the director of {s}?",
                "Who is the boss of {s}?",
                "Who is the president of {s}?",
            ),
            ("Who is the chief executive of {s}?", "Who is the chief of {s}?"),
        ),
        phrases=Parts(
            ("the director of {s}", "the boss of {s}", "the president of {s}"),
            ("the chief executive of {s}", "the chief of {s}"),
        ),
        descriptions=Parts(
            ("a company with {o} as its director", "the company of {o}"),
            ("a firm whose chief is {o}", "the firm of {o}"),
        ),
    ),
}

REFERENCES: tuple[Reference, ...] = (
    Reference(
        subject="project",
        object="city",
        statements=Parts(
            (
                "The {thing} named in the previous document was later moved to {o}.",
                "The team described in the previous document moved to {o}.",
                "The {thing} mentioned in the document above relocated to {o}.",
                "A new hall in {o} is now used by the {thing} from the last document.",
                "In May the {thing} of the document before this one moved to {o}.",
            ),
            (
                "The {thing} described in the previous document has since moved to {o}.",
                "The {thing} named in the document above relocated to {o} in the end.",
            ),
        ),
        questions=Parts(
            ("To which city did {s} move?", "Where did {s} move?", "Where did {s} relocate to?"),
            ("To what city did {s} relocate?", "To what city was {s} moved?"),
        ),
    ),
    Reference(
        subject="person",
        object="city",
        statements=Parts(
            (
                "The {thing} named in the previous document spent the summer in {o}.",
                "The {thing} mentioned in the document above traveled to {o}.",
                "Last week the {thing} from the last document went to {o}.",
                "A trip to {o} was made by the {thing} of the document before this one.",
            ),
            (
                "The {thing} described in the previous document flew to {o}.",
                "The {thing} named in the document above took a trip to {o}.",
            ),
        ),
        questions=Parts(
            (
                "To which city did {s} travel?",
                "Where did {s} go?",
                "Which city was visited by {s}?",
            ),
            ("To what city did {s} fly?", "What city did {s} visit?"),
        ),
    ),
    Reference(
        subject="company",
        object="city",
        statements=Parts(
            (
                "The {thing} named in the previous document opened a branch in {o}.",
                "The {thing} mentioned in the document above now has a second shop in {o}.",
                "A branch in {o} was opened by the {thing} from the last document.",
                "The {thing} of the document before this one has a new branch in {o}.",
            ),
            (
                "The {thing} described in the previous document set up a new branch in {o}.",
                "The {thing} named in the document above has just opened a branch in {o}.",
            ),
        ),
        questions=Parts(
            (
                "Where did {s} open a branch?",
                "In which city is the new branch of {s}?",
                "Which city has a branch of {s}?",
            ),
            ("In what city did {s} set up a branch?", "In what city is the branch of {s}?"),
        ),
    ),
    Reference(
        subject="project",
        object="person",
        statements=Parts(
            (
                "The {thing} named in the previous document is reviewed by {o}.",
                "{o} checks the results of the {thing} mentioned in the document above.",
                "{o} is the reviewer of the {thing} from the last document.",
                "The results of the {thing} of the document before this one go to {o}.",
            ),
            (
                "The {thing} described in the previous document is inspected by {o}.",
                "{o} reviews the {thing} named in the document above.",
            ),
        ),
        questions=Parts(
            ("Who reviews {s}?", "Who is the reviewer of {s}?", "Who checks the results of {s}?"),
            ("Who inspects {s}?", "By whom is {s} reviewed?"),
        ),
    ),
    Reference(
        subject="person",
        object="product",
        statements=Parts(
            (
                "The {thing} named in the previous document collects {o}.",
                "The {thing} mentioned in the document above likes to collect {o}.",
                "The hobby of the {thing} from the last document is collecting {o}.",
                "A room full of {o} belongs to the {thing} of the document before this one.",
            ),
            (
                "The {thing} described in the previous document has a collection of {o}.",
                "The {thing} named in the document above is a collector of {o}.",
            ),
        ),
        questions=Parts(
            (
                "What does {s} collect?",
                "What is collected by {s}?",
                "What does {s} like to collect?",
            ),
            ("What is in the collection of {s}?", "What is {s} a collector of?"),
        ),
    ),
)

PASSAGE_QUESTIONS = Parts(
    (
        "Which passage is about {d}?",
        "Which passage describes {d}?",
        "Find the passage about {d}.",
        "In which passage do we read about {d}?",
        "Which of the passages speaks of {d}?",
    ),
    ("Which passage mentions {d}?", "Which passage tells us about {d}?"),
)
VARIABLE_QUESTIONS = Parts(
    (
        "Which number does VAR {v} hold?",
        "What number is stored in VAR {v}?",
        "VAR {v} = ?",
        "Find the value of VAR {v}.",
    ),
    ("What is the value of VAR {v}?", "What value does VAR {v} have?"),
)
