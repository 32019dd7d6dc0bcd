"""The words of the synthetic corpus: English beside German."""

from __future__ import annotations

from typing import Final, NamedTuple


class Noun(NamedTuple):
    """English singular and plural, German singular and plural, gender (m, f, n), ending of the oblique singular."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    oblique: str = ""


class Verb(NamedTuple):
    """English base, third person, participle and particle; German third person, plural, participle, separable prefix
    and auxiliary of the perfect."""

    english: str
    english_third: str
    english_participle: str
    particle: str
    german_third: str
    german: str
    german_participle: str
    prefix: str
    auxiliary: str


def _rows(table: str) -> list[list[str]]:
    """One row a line; `_` is a space inside a word, `-` is nothing."""
    cells = [line.split() for line in table.strip().splitlines()]
    return [["" if cell == "-" else cell.replace("_", " ") for cell in row] for row in cells]


def _nouns(table: str) -> list[Noun]:
    return [Noun(*row) for row in _rows(table)]


def _verbs(table: str) -> list[Verb]:
    return [Verb(*row) for row in _rows(table)]


PEOPLE: Final = _nouns("""
man        men         Mann      Männer       m
woman      women       Frau      Frauen       f
child      children    Kind      Kinder       n
boy        boys        Junge     Jungen       m  n
girl       girls       Mädchen   Mädchen      n
teacher    teachers    Lehrer    Lehrer       m
doctor     doctors     Arzt      Ärzte        m
king       kings       König     Könige       m
neighbour  neighbours  Nachbar   Nachbarn     m  n
aunt       aunts       Tante     Tanten       f
""")

ANIMALS: Final = _nouns("""
dog        dogs        Hund      Hunde        m
cat        cats        Katze     Katzen       f
horse      horses      Pferd     Pferde       n
bird       birds       Vogel     Vögel        m
""")

THINGS: Final = _nouns("""
book       books       Buch      Bücher       n
letter     letters     Brief     Briefe       m
picture    pictures    Bild      Bilder       n
apple      apples      Apfel     Äpfel        m
key        keys        Schlüssel Schlüssel    m
cup        cups        Tasse     Tassen       f
flower     flowers     Blume     Blumen       f
hat        hats        Hut       Hüte         m
""")

FURNITURE: Final = _nouns("""
table      tables      Tisch     Tische       m
chair      chairs      Stuhl     Stühle       m
door       doors       Tür       Türen        f
lamp       lamps       Lampe     Lampen       f
bag        bags        Tasche    Taschen      f
""")

PLACES: Final = _nouns("""
house      houses      Haus      Häuser       n
garden     gardens     Garten    Gärten       m
kitchen    kitchens    Küche     Küchen       f
school     schools     Schule    Schulen      f
forest     forests     Wald      Wälder       m
city       cities      Stadt     Städte       f
room       rooms       Zimmer    Zimmer       n
park       parks       Park      Parks        m
""")

# First parts of compounds with the linking form that they take: kitchen table, Küchentisch.
MODIFIERS: Final = [
    ("kitchen", "Küchen"),
    ("garden", "Garten"),
    ("school", "Schul"),
    ("wood", "Holz"),
]

# Of persons and animals: English, German in the predicate, German stem before an ending.
PERSON_ADJECTIVES: Final = _rows("""
old        alt        alt
young      jung       jung
small      klein      klein
big        groß       groß
good       gut        gut
tired      müde       müd
""")

# Of things and places.
THING_ADJECTIVES: Final = _rows("""
old        alt        alt
new        neu        neu
small      klein      klein
big        groß       groß
red        rot        rot
dark       dunkel     dunkl
""")

# Verbs with an accusative object that is a person or an animal, ...
SEE: Final = _verbs("""
see        sees        seen        -      sieht     sehen      gesehen     -    haben
love       loves       loved       -      liebt     lieben     geliebt     -    haben
visit      visits      visited     -      besucht   besuchen   besucht     -    haben
look_for   looks_for   looked_for  -      sucht     suchen     gesucht     -    haben
call       calls       called      up     ruft      rufen      gerufen     an   haben
invite     invites     invited     -      lädt      laden      geladen     ein  haben
""")

# ... or a thing.
TAKE: Final = _verbs("""
find       finds       found       -      findet    finden     gefunden    -    haben
buy        buys        bought      -      kauft     kaufen     gekauft     -    haben
carry      carries     carried     -      trägt     tragen     getragen    -    haben
paint      paints      painted     -      malt      malen      gemalt      -    haben
pick       picks       picked      up     hebt      heben      gehoben     auf  haben
bring      brings      brought     along  bringt    bringen    gebracht    mit  haben
""")

# Verbs with a dative object, a person.
HELP: Final = _verbs("""
help       helps       helped      -      hilft     helfen     geholfen    -    haben
thank      thanks      thanked     -      dankt     danken     gedankt     -    haben
follow     follows     followed    -      folgt     folgen     gefolgt     -    sein
""")

# Verbs with a person in the dative and a thing in the accusative.
GIVE: Final = _verbs("""
give       gives       given       -      gibt      geben      gegeben     -    haben
show       shows       shown       -      zeigt     zeigen     gezeigt     -    haben
sell       sells       sold        -      verkauft  verkaufen  verkauft    -    haben
""")

# Verbs with a direction.
GO: Final = _verbs("""
go         goes        gone        -      geht      gehen      gegangen    -    sein
run        runs        run         -      läuft     laufen     gelaufen    -    sein
""")

# Verbs with at most a place.
SLEEP: Final = _verbs("""
sleep      sleeps      slept       -      schläft   schlafen   geschlafen  -    haben
wait       waits       waited      -      wartet    warten     gewartet    -    haben
work       works       worked      -      arbeitet  arbeiten   gearbeitet  -    haben
get_up     gets_up     got_up      -      steht     stehen     gestanden   auf  sein
""")

# Verbs with a that-clause.
SAY: Final = _verbs("""
say        says        said        -      sagt      sagen      gesagt      -    haben
believe    believes    believed    -      glaubt    glauben    geglaubt    -    haben
""")

# English third person and plural, German third person and plural.
MODALS: Final = _rows("""
can        can         kann      können
must       must        muss      müssen
wants_to   want_to     will      wollen
""")

# English subject and object; German nominative, accusative, dative; number.
PRONOUNS: Final = _rows("""
he         him         er        ihn        ihm       singular
she        her         sie       sie        ihr       singular
they       them        sie       sie        ihnen     plural
we         us          wir       uns        uns       plural
""")

TIMES: Final = _rows("""
today           heute
now             jetzt
often           oft
at_night        nachts
every_day       jeden_Tag
in_the_evening  am_Abend
""")

# English, German, German case.
LOCATIONS: Final = _rows("""
in           in      dative
behind       hinter  dative
in_front_of  vor     dative
""")

DIRECTIONS: Final = _rows("""
into         in      accusative
through      durch   accusative
out_of       aus     dative
to           zu      dative
""")

COMPANIES: Final = _rows("""
with         mit     dative
for          für     accusative
without      ohne    accusative
""")

CONJUNCTIONS: Final = _rows("""
because      weil
when         wenn
although     obwohl
before       bevor
""")
