#!/usr/bin/env python3
"""Prompts whose answers a draft head learns from. Uses only the standard library.

    head_prompts.py prompts 30000                     writes prompts of all kinds, as JSON lines
    head_prompts.py follow 8000 < answers.jsonl       writes prompts about texts that a model wrote

Both take a seed as an optional third argument (default 1). The same arguments give the same lines,
and the first lines of a longer output are those of a shorter one.

A template is a text with slots: {word} draws from the list WORDS["word"], which may hold templates
itself; {word1} and {word2} draw different values and keep them within one prompt; {3-9} draws a
number. A template that starts with "!" is a command, which may be wrapped in a polite form.
"""

import json
import random
import re
import sys


def split(text):
    """The items of a text, separated by semicolons."""
    return [" ".join(item.split()) for item in text.split(";") if item.strip()]


def lines(text):
    """The templates of a text, separated by tildes."""
    return [" ".join(item.split()) for item in text.split("~") if item.strip()]


WORDS = {}
FIELDS = {
    "science": """photosynthesis; black holes; plate tectonics; the greenhouse effect; DNA replication; natural selection; gravity; magnetism; nuclear fusion; nuclear fission; radioactivity; the periodic table; chemical bonds; acids and bases; osmosis;
enzymes; the water cycle; the carbon cycle; ocean currents; volcanoes; earthquakes; tsunamis; lightning; tornadoes; the ozone layer; light refraction; sound waves; the Doppler effect; special relativity; entropy; superconductors;
semiconductors; lasers; dark matter; supernovae; comets; the Big Bang; exoplanets; tides; eclipses; fossils; dinosaurs; mitosis; stem cells; viruses; bacteria; fungi; coral reefs; food chains; symbiosis; bird migration; hibernation;
metamorphosis; pollination; soil erosion; crystals; catalysts; friction; momentum; kinetic energy; electric circuits; quantum entanglement; the photoelectric effect; Archimedes' principle; neurons; mutations""",
    "history": """the Roman Empire; the French Revolution; the Industrial Revolution; the Silk Road; the Black Death; the Renaissance; the Cold War; the fall of the Berlin Wall; the Ottoman Empire; the Mongol Empire; the Aztecs; the Incas; ancient Egypt;
ancient Greece; the Crusades; the Magna Carta; feudalism; the Viking age; colonialism; the Atlantic slave trade; the American Civil War; the First World War; the Great Depression; the Russian Revolution; the Meiji Restoration; the
Enlightenment; the printing press; the space race; women's suffrage; apartheid; the Reformation; the Byzantine Empire; the Han dynasty; the Punic Wars; the Age of Exploration; the Marshall Plan""",
    "geography": """the Sahara; the Amazon rainforest; the Himalayas; monsoons; river deltas; glaciers; fjords; tundra; the Great Barrier Reef; the Dead Sea; the Panama Canal; the Suez Canal; urbanization; desertification; time zones; latitude and
longitude; map projections; islands; the Arctic; Antarctica; the Mediterranean climate; the Andes; wetlands; overpopulation; megacities; population pyramids""",
    "law": """copyright; patents; trademarks; contracts; habeas corpus; the presumption of innocence; juries; tenants' rights; consumer protection; data protection; freedom of speech; constitutional law; the separation of powers; human rights;
international law; wills and inheritance; small claims courts; labour law; plea bargaining; judicial review""",
    "economics": """inflation; supply and demand; interest rates; gross domestic product; unemployment; monopolies; opportunity cost; comparative advantage; game theory; taxes; tariffs; stock markets; bonds; central banks; exchange rates; compound
interest; insurance; mortgages; venture capital; microfinance; externalities; price elasticity; recessions; public debt; the minimum wage; universal basic income; cryptocurrencies; startups; branding; supply chains""",
    "health": """diabetes; high blood pressure; vaccines; antibiotics; allergies; asthma; sleep; stress; meditation; a balanced diet; vitamins; the immune system; the heart; the liver; the kidneys; digestion; migraines; anxiety; depression; first aid;
dehydration; cholesterol; dental care; physiotherapy; posture; stretching; eyesight; hearing loss; food poisoning; sunburn; the common cold; burnout; ageing; pregnancy; blood types""",
    "technology": """machine learning; neural networks; blockchain; encryption; the internet; search engines; databases; operating systems; cloud computing; 3D printing; electric cars; solar panels; wind turbines; batteries; GPS; robots; drones; virtual
reality; quantum computers; microchips; touch screens; fibre optics; Wi-Fi; compilers; open source software; version control; phishing; passwords; satellites; heat pumps; self-driving cars; barcodes; smartphones; large language models;
recommendation systems; facial recognition; digital cameras; jet engines; steam engines""",
    "art": """impressionism; cubism; jazz; opera; ballet; the blues; hip hop; photography; sculpture; watercolour painting; perspective in painting; Gothic architecture; Baroque music; haiku; sonnets; the novel; film editing; film noir; animation;
theatre; Greek tragedy; Shakespeare's plays; folk tales; graphic design; typography; street art; pottery; origami; calligraphy; the symphony; surrealism; fashion; science fiction; detective stories; magical realism""",
    "philosophy": """stoicism; utilitarianism; existentialism; free will; the social contract; Plato's cave; scepticism; empiricism; rationalism; virtue ethics; the trolley problem; Buddhism; Confucianism; Taoism; nihilism; the mind-body problem; Occam's
razor; the scientific method; logical fallacies; justice; happiness; beauty; consciousness; personal identity; moral relativism; the meaning of life; Kant's ethics; deontology""",
    "society": """democracy; federalism; elections; the United Nations; the European Union; nationalism; migration; gender equality; public education; homeschooling; social media; advertising; journalism; propaganda; trade unions; volunteering; poverty;
homelessness; public transport; the welfare state; bilingualism; dialects; sign language; Esperanto; proverbs; conformity; memory; motivation; cognitive biases; the placebo effect; child development; peer pressure; lobbying; privacy;
sustainable development; recycling; climate change; renewable energy; biodiversity""",
    "everyday": """baking bread; coffee; tea; chocolate; cheese; olive oil; rice; spices; fermentation; gardening; composting; houseplants; dogs; cats; bicycles; running; swimming; yoga; football; chess; board games; video games; camping; hiking;
travelling by train; budgeting; shopping online; working from home; time management; public speaking; job interviews; learning a language; reading; knitting; carpentry; home repairs; laundry; cooking for a family; birthday parties;
weddings; road trips; fishing; bird watching; collecting stamps; playing the guitar; dancing""",
}
for field, text in FIELDS.items():
    WORDS[field] = split(text)
WORDS["topic"] = sum((WORDS[field] for field in FIELDS), [])
WORDS["hard"] = [topic for field in FIELDS if field not in ("everyday",) for topic in WORDS[field]]

LISTS = """
name: Ana; Bilal; Chloe; Diego; Elif; Farid; Greta; Hana; Ivan; Jonas; Keiko; Lena; Marco; Nadia; Omar; Priya; Quinn; Rosa; Samir; Tessa; Uma; Viktor; Wendy; Yusuf; Zoe; Carl; Ben; Sara; Paul; Mia
surname: Novak; Okafor; Lindqvist; Petrov; Garcia; Tanaka; Weber; Rossi; Haddad; Murphy; Silva; Jensen; Kowalski; Chen; Dubois; Singh; Brown; Kim
city: Lisbon; Oslo; Nairobi; Lima; Hanoi; Prague; Toronto; Cairo; Mumbai; Seoul; Dublin; Vienna; Boston; Melbourne; Istanbul; Hamburg; Naples; Kyoto; Denver; Lyon
thing: apples; pencils; stickers; marbles; books; postcards; cupcakes; candles; buttons; shells; coins; balloons; tickets; notebooks; oranges; beads; cookies; stamps
good: notebook; lamp; jacket; backpack; mug; chair; pair of shoes; board game; headset; blanket; umbrella; keyboard; bicycle helmet; frying pan; water bottle; desk; tent; watch
job: nurse; teacher; carpenter; software developer; farmer; pilot; chef; journalist; librarian; electrician; architect; bus driver; biologist; lawyer; tailor; firefighter; accountant; photographer; plumber; midwife
persona: lighthouse keeper; medieval blacksmith; ship's captain; museum guide; detective; grumpy old wizard; astronaut on Mars; sports commentator; fortune teller; strict piano teacher; friendly robot; time traveller from 2300; pirate cook; news anchor; travel agent; sommelier; personal trainer; career coach; history professor; stand-up comedian; talking tree; village mayor; marine biologist; bookshop owner; Roman soldier; ghost in an old hotel; beekeeper; chess grandmaster; tour guide; taxi driver; dragon who hates fire; medieval monk; film critic; psychologist; startup founder; grandmother who tells stories; customer support agent; spy; mountain guide; vegetarian butcher
famous: Isaac Newton; Marie Curie; Leonardo da Vinci; Cleopatra; Napoleon; Albert Einstein; Ada Lovelace; Mozart; Charles Darwin; Nikola Tesla; Galileo; Socrates; Frida Kahlo; Jane Austen; Florence Nightingale; Julius Caesar; Confucius; Beethoven; Amelia Earhart; Alan Turing; Gutenberg; Marco Polo; Vincent van Gogh; Nelson Mandela; Mahatma Gandhi; Aristotle; Johannes Kepler; Louis Pasteur; Alexander Fleming; Rosa Parks; Joan of Arc; Genghis Khan; Rembrandt; Picasso; Bach; Chopin; Archimedes; Euclid; Michael Faraday; Gregor Mendel
country: Argentina; Australia; Austria; Bangladesh; Belgium; Bolivia; Brazil; Bulgaria; Cambodia; Canada; Chile; China; Colombia; Croatia; Cuba; Denmark; Ecuador; Egypt; Estonia; Ethiopia; Finland; France; Germany; Ghana; Greece; Hungary; Iceland; India; Indonesia; Iran; Iraq; Ireland; Israel; Italy; Jamaica; Japan; Jordan; Kenya; Laos; Latvia; Lebanon; Malaysia; Mali; Malta; Mexico; Mongolia; Morocco; Nepal; Nigeria; Norway; Pakistan; Peru; Poland; Portugal; Romania; Russia; Rwanda; Senegal; Serbia; Slovakia; Slovenia; Spain; Sri Lanka; Sudan; Sweden; Switzerland; Syria; Thailand; Tunisia; Turkey; Uganda; Ukraine; Uruguay; Venezuela; Vietnam; Zambia; South Korea; New Zealand; South Africa; Saudi Arabia
capital: Paris; Madrid; Canberra; Ottawa; Brasília; Buenos Aires; Tokyo; Bangkok; Jakarta; Berlin; Rome; Athens; Warsaw; Budapest; Helsinki; Stockholm; Copenhagen; Brussels; Bern; Ankara; Tehran; Baghdad; Beirut; Rabat; Tunis; Accra; Abuja; Addis Ababa; Bogotá; Quito; Santiago; Havana; Kingston; Wellington; Manila; Hanoi; Kathmandu; Dhaka; Islamabad; Riga
river: Nile; Danube; Rhine; Amazon; Ganges; Mekong; Volga; Thames; Seine; Mississippi; Congo; Niger; Zambezi; Yangtze; Indus; Euphrates; Elbe; Po; Orinoco; Murray
mountain: Mount Everest; Kilimanjaro; Mont Blanc; K2; Mount Fuji; Aconcagua; Denali; Mount Etna; Vesuvius; Mount Olympus; the Matterhorn; Ararat
planet: Mercury; Venus; Mars; Jupiter; Saturn; Uranus; Neptune; Earth
element: hydrogen; helium; lithium; carbon; nitrogen; oxygen; neon; sodium; magnesium; aluminium; silicon; sulphur; chlorine; potassium; calcium; iron; copper; zinc; silver; tin; iodine; tungsten; platinum; gold; mercury; lead; uranium; titanium; nickel; radium
invention: telephone; light bulb; steam engine; telescope; microscope; radio; television; aeroplane; dynamite; typewriter; sewing machine; World Wide Web; computer mouse; transistor; refrigerator; bicycle; zipper; parachute; thermometer; barometer; battery; camera; helicopter; ballpoint pen; vacuum cleaner; stethoscope; pencil; dishwasher; X-ray machine; piano; saxophone; submarine; hot air balloon; mechanical clock; barcode
book: Don Quixote; War and Peace; Hamlet; Moby Dick; Pride and Prejudice; The Odyssey; Frankenstein; Dracula; 1984; Animal Farm; The Great Gatsby; Ulysses; The Trial; Faust; Les Misérables; Jane Eyre; Wuthering Heights; Crime and Punishment; The Little Prince; The Hobbit; Brave New World; Oliver Twist; Treasure Island; Robinson Crusoe; Alice in Wonderland; Macbeth; The Divine Comedy; Gulliver's Travels; The Jungle Book; Emma; Walden; Candide
painting: Mona Lisa; Starry Night; Guernica; The Scream; The Night Watch; Girl with a Pearl Earring; The Birth of Venus; The Last Supper; The Kiss; American Gothic; Water Lilies; The Persistence of Memory
sport: football; basketball; volleyball; tennis; cricket; rugby; ice hockey; baseball; handball; water polo; badminton; golf; table tennis; boxing; fencing; rowing; judo; curling
animal: elephant; blue whale; cheetah; octopus; spider; honeybee; crocodile; penguin; kangaroo; giraffe; bat; camel; horse; wolf; tiger; snail; salmon; ostrich; koala; dolphin; hummingbird; tortoise; shark; ant; butterfly; owl; polar bear; squid; lobster; gorilla
event: the French Revolution; the First World War; the Second World War; the Battle of Waterloo; the moon landing; the sinking of the Titanic; the Great Fire of London; the fall of Constantinople; the Norman conquest of England; the Russian Revolution; the Chernobyl disaster; the signing of the Magna Carta; the American Declaration of Independence; the opening of the Eiffel Tower; the first modern Olympic Games; the Wall Street crash; the fall of the Berlin Wall; the Korean War; the eruption of Krakatoa; the founding of the United Nations; the Battle of Hastings; the Spanish Civil War
landmark: the Eiffel Tower; the Taj Mahal; Machu Picchu; the Colosseum; Big Ben; the Statue of Liberty; the Great Wall; Stonehenge; Petra; Angkor Wat; the Acropolis; the Alhambra; the Louvre; the Kremlin; the Brooklyn Bridge; the Sagrada Família; Notre-Dame; the Blue Mosque; the Sydney Opera House; Mount Rushmore
instrument: piano; violin; guitar; cello; harp; clarinet; ukulele; trumpet; flute; banjo
unit: kilometres in a mile; seconds in a day; grams in a pound; feet in a mile; hours in a week; degrees in a circle; bits in a byte; days in a leap year; millimetres in a metre; minutes in a week; years in a millennium; litres in a gallon; inches in a yard; sides on an octagon; cards in a standard deck; keys on a standard piano; bones in the adult human body; teeth in an adult mouth; players in a chess game; squares on a chessboard; letters in the Greek alphabet; zeros in a billion; chambers in the human heart; continents on Earth; planets in the solar system
audience: a beginner; a ten-year-old; a curious teenager; a busy manager; an exchange student; my grandmother; someone with no background; a high school class; a college student; a sceptic; a new colleague
form: in one paragraph; in {2-5} sentences; in about {40-250} words; as bullet points; step by step; in a table; as a numbered list; with an example; with two examples; in plain English; in simple terms; using an analogy; in less than {60-150} words; as a short essay; as a question-and-answer list; in a formal tone; in a casual tone; with a short summary at the end; under clear headings; in {3-7} short points
tail:;;;; Keep it short.; Please be concise.; Give examples.; Use simple language.; Be detailed.; Explain why.; Answer {form}.; I'm writing for {audience}.; Do not use jargon.; Thanks!; End with a one-line summary.; Use at most {40-200} words.; Think step by step.
qtail:;;;;; Answer briefly.; One sentence is enough.; Just the answer, please.; Answer {form}.; And why?; I forgot.; It's for a quiz.
goal: save money on groceries; sleep better; learn {lang} in a year; prepare for a job interview; quit sugar; start running; remove a coffee stain; write a CV; ask for a raise; study for an exam; plan a trip to {city}; cook for {3-12} guests; fix a leaking tap; grow tomatoes on a balcony; train a puppy; stop procrastinating; make new friends in {city}; deal with a noisy neighbour; choose a laptop; learn to play the {instrument}; clean an oven; pack for {3-14} days; write a speech; back up my photos; lose {3-15} kilos safely; meditate; organize a small wedding; repair a bicycle tyre; bake sourdough bread; read more books; reduce screen time; negotiate rent; move to {city}; start a blog about {everyday}; teach a child about {topic}; give feedback to a colleague; get over a breakup; improve my handwriting; reduce my electricity bill; start composting; hold a meeting; invest my first savings; take better photos; stay awake at work; prepare for a marathon; stop biting my nails; help a friend who is sad; run a book club; become a {job}; get better at {everyday}; build a simple bookshelf; paint a room; remember names; protect my password; cope with exam stress; talk to my boss about workload
lang: Spanish; Japanese; Arabic; French; Portuguese; Korean; Italian; Turkish; Greek; Polish
tone: friendly; formal; apologetic; funny; persuasive; warm; short and direct; cheerful; serious; diplomatic; poetic; enthusiastic
plang: Python; Python; Python; JavaScript; C++; Java; bash; Rust; Go; TypeScript; C
ctask: reverses a string; checks if a number is prime; merges two sorted lists; counts the words in a text; finds the longest word in a sentence; computes the first {5-40} Fibonacci numbers; removes duplicates from a list; sorts a list of numbers without library functions; checks if a string is a palindrome; finds the second largest number in an array; converts Celsius to Fahrenheit; validates an email address; parses a CSV line; computes the factorial of n; finds all pairs that sum to {5-90}; rotates an array by {2-9} places; computes the greatest common divisor; generates a random password of {8-20} characters; implements binary search; implements a stack; implements a queue with two stacks; checks that brackets are balanced; reads a file and prints the {3-12} most frequent words; flattens a nested list; transposes a matrix; counts vowels; converts a number to binary; converts Roman numerals to integers; finds the missing number from 1 to {10-100}; computes the median; groups words that are anagrams; implements a linked list; traverses a binary tree in order; finds the shortest path in a grid; prints a triangle of {4-12} rows; simulates rolling {2-6} dice; caches the results of a slow function; splits a list into chunks of {2-9}; downloads a web page; formats a date; finds the longest common prefix; computes the edit distance of two strings; computes compound interest; counts inversions in an array; draws a multiplication table up to {5-20}; finds the largest sum of a contiguous subarray; renames all files in a folder; encrypts text with a Caesar shift of {2-20}; keeps the top {3-10} scores of a game; topologically sorts a graph; checks if a year is a leap year; sums the digits of a number
concept: recursion; pointers; closures; inheritance; async and await; list comprehensions; hash tables; garbage collection; mutexes; race conditions; generics; unit tests; REST APIs; big O notation; dynamic programming; regular expressions; pass by reference; exceptions; interfaces; iterators; decorators; git rebase; SQL joins; database indexes; transactions; lambda functions; the call stack; the heap and the stack; type inference; event loops; memory leaks; unicode; floating point rounding; binary trees; Docker containers; dependency injection; foreign keys; pipes in bash; environment variables; cron jobs; immutability
table: customers; orders; employees; products; students; flights; books; payments; sensors; reviews
column: price; created_at; country; age; score; salary; status; quantity; category; rating
"""
for line in LISTS.strip().splitlines():
    key, _, text = line.partition(":")
    WORDS[key] = [item.strip() if not key.endswith("tail") else item.rstrip() for item in text.split(";")]
WORDS["code"] = ["def mean(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total / len(xs) + {1-9}",
                 "def find(xs, y):\n    for i in range(1, len(xs)):\n        if xs[i] == y:\n            return i\n    return -{1-9}",
                 "for (let i = 0; i <= items.length; i++) {\n  console.log(items[i].price * {2-9});\n}",
                 "int sum = 0;\nfor (int i = 0; i < {5-50}; i++)\n    sum += i * i;\nstd::cout << sum;",
                 "def f(n):\n    return {1-5} if n <= 1 else n * f(n - {1-3})",
                 "words = text.split()\ncounts = {}\nfor w in words:\n    counts[w] += {1-5}",
                 "SELECT {column1}, COUNT(*) FROM {table1} WHERE {column2} > {2-99} GROUP BY {column1};",
                 "x = [{1-9}, {1-9}, {1-9}]\ny = x\ny.append({10-99})\nprint(x)",
                 "const total = [{1-20}, {1-20}, {1-20}].map(n => n * {2-9}).reduce((a, b) => a + b);",
                 "for f in *.txt; do\n  mv $f {table}_$f\ndone",
                 "public static boolean ok(String s) {\n    return s == \"{column}\";\n}",
                 "def add(item, bag=[]):\n    bag.append(item)\n    return len(bag) * {1-9}",
                 "while n > {1-9}:\n    if n % 2 == 0:\n        n = n / 2\n    print(n)",
                 "a, b = {0-5}, {1-9}\nwhile a < {20-500}:\n    print(a)\n    a, b = b, a + b"]
WORDS["scene"] = split("""a letter that arrives {2-60} years late; a {job} who finds a map; two strangers on a night train; a town where nobody sleeps; a robot that learns about {art}; the last bookshop in {city}; a cat that runs a café; a storm at sea; a
mistake that saves a life; a door that opens only in winter; an old {job} and a young {job}; a boy who collects sounds; a secret under the school; a broken clock in {city}; a dog that travels to {city}; a {persona} who loses a bet; a
world without {everyday}; a friendship between a {animal1} and a {animal2}; a message in a bottle; the first day of {name} as a {job}; a library on the moon; a race across {country}; a family recipe; an honest thief; a quiet revolution""")
WORDS["message"] = split("""a meeting on {day} that must move; a delayed delivery of a {good}; a request for {2-10} days of holiday; a broken {good} that I want to return; thanks for a reference; an invitation to a dinner in {city}; a job application as a {job}; a
complaint about a hotel in {city}; congratulations on a promotion; a reminder about an unpaid bill of {30-900} euros; an apology for missing a call; a resignation; a project that is {2-9} weeks late; asking a professor for advice on
{hard}; a change of office to {city}; a lost parcel; a thank-you to a {job}; a welcome to a new colleague, {name}; a proposal for a workshop about {topic}; a fundraiser for {society}; noise in the flat above""")
WORDS["day"] = split("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")
WORDS["month"] = split("January; March; April; May; June; July; September; October; November; December")
WORDS["compare"] = split("""{sport1} and {sport2}; {city1} and {city2}; {hard1} and {hard2}; renting and buying a home; cats and dogs; trains and planes; working as a {job1} and working as a {job2}; books and films; {country1} and {country2}; paper books and
e-books; gas and induction cookers; living alone and with flatmates; public and private schools; {instrument1} and {instrument2}; summer and winter holidays; the {animal1} and the {animal2}""")

OPEN = lines("""!explain {topic} {form}.{tail} ~ !explain {topic} to {audience}.{tail} ~ !describe how people think about {society} in {country} today.{tail} ~ What is the importance of {topic}?{tail} ~ Why does {topic} matter?{tail} ~ What are the
most common misunderstandings about {topic}?{tail} ~ !give me an overview of {topic} {form}. ~ What should everyone know about {topic}?{tail} ~ How has our understanding of {science} changed over time?{tail} ~ What role did {famous}
play in history?{tail} ~ What caused {event}, and what followed?{tail} ~ How does {technology} work?{tail} ~ What are the main ideas behind {philosophy}?{tail} ~ !list {3-10} facts about {topic}.{tail} ~ !list {3-8} questions that a
student could ask about {topic}, and answer them. ~ !write lecture notes on {hard} for {audience}.{tail} ~ What is the link between {topic1} and {topic2}?{tail} ~ How are {science} and {technology} connected?{tail} ~ What are the causes
and effects of {economics}?{tail} ~ I'm reading about {hard} and I'm confused. Where should I start?{tail} ~ My teacher asked us to prepare something on {hard}. What are the key points?{tail} ~ What would {famous} have thought about
{technology}?{tail} ~ !discuss the ethical questions around {technology} {form}. ~ How do experts study {hard}?{tail} ~ How does {economics} affect ordinary people in {country}?{tail} ~ What is a good definition of {hard}?{tail} ~
!define {hard} {form}. ~ How would you teach {topic} to {audience}?{tail} ~ Who were the important people in the history of {topic}?{tail} ~ What are the risks and benefits of {technology}?{tail} ~ What is known about {health}, and how
can people deal with it?{tail} ~ !describe the geography and climate of {country}.{tail} ~ !tell me about the culture and food of {country} {form}. ~ What problems are there in {law}, and how could they be solved?{tail} ~ !explain the
difference between {hard1} and {hard2} {form}. ~ Is it true that {hard} changed the world? Explain. ~ !summarize the story of {event} {form}. ~ What will {technology} look like in {5-50} years?{tail} ~ !give a timeline of
{history}.{tail} ~ How did {history} influence {art}?{tail} ~ {topic}?? whats that{tail} ~ I know nothing about {topic}. Teach me the basics {form}. ~ As {audience}, what should I learn about {topic} first? ~ !suggest an experiment or
activity that shows {science} in practice.{tail} ~ !write a glossary of {4-10} terms about {hard}.""")
TRIVIA = lines("""what is the capital of {country}? ~ which country is {capital} the capital of? ~ what currency is used in {country}? ~ what language do people speak in {country}? ~ which countries border {country}? ~ which continent is {country} in? ~
how many people live in {country}? ~ what is the largest city in {country}? ~ what is the highest mountain in {country}? ~ when did {country} become independent? ~ what are the colours of the flag of {country}? ~ what is {country}
famous for? ~ what river flows through {capital}? ~ in which country does the {river} begin? ~ how long is the {river}? ~ into which sea does the {river} flow? ~ where is {mountain}? ~ how high is {mountain}? ~ who first climbed
{mountain}? ~ how many moons does {planet} have? ~ how far is {planet} from the sun? ~ how long is a year on {planet}? ~ what is the chemical symbol for {element}? ~ what is the atomic number of {element}? ~ who discovered {element}? ~
what is {element} used for? ~ at what temperature does {element} melt? ~ who invented the {invention}? ~ when was the {invention} invented? ~ in which country was the {invention} invented? ~ who wrote {book}? ~ when was {book}
published? ~ who is the main character of {book}? ~ where does the story of {book} take place? ~ who painted {painting}? ~ where can you see the painting {painting}? ~ how many players are in a {sport} team? ~ where does the sport of
{sport} come from? ~ how long does a match of {sport} last? ~ how many legs does a {animal} have? ~ how long does a {animal} live? ~ what does a {animal} eat? ~ how fast is a {animal}? ~ how heavy is an adult {animal}? ~ what do you
call a baby {animal}? ~ where in the world do you find a {animal}? ~ when did {event} happen? ~ who was the leader during {event}? ~ when was {famous} born? ~ where was {famous} born? ~ what is {famous} best known for? ~ how did
{famous} die? ~ where is {landmark}? ~ how old is {landmark}? ~ who built {landmark}? ~ how many {unit} are there? ~ how many strings or keys does a {instrument} have? ~ who is the most famous {instrument} player of all time? ~ which is
bigger, {country1} or {country2}? ~ which is older, {landmark1} or {landmark2}? ~ which is heavier, a {animal1} or a {animal2}? ~ who lived first, {famous1} or {famous2}? ~ which is longer, the {river1} or the {river2}? ~ who won the
football world cup in {1970-2018}? ~ which planet is hotter, {planet1} or {planet2}? ~ what happened in {1750-2015}? ~ who was in power in {country} in {1900-2015}? ~ what is the square of {11-60}? ~ what time zone is {capital} in? ~
what is the distance between {capital1} and {capital2}?""")
MATH = lines("""{name1} has {12-90} {thing1} and gives {2-11} of them to {name2}. How many {thing1} does {name1} have left? ~ A shop sells {thing1} at ${2-9} each. {name1} buys {3-12} of them and pays with a ${50-200} note. How much change is due? ~ A
train leaves {city1} at {60-140} km/h. How far does it get in {2-9} hours and {10-50} minutes? ~ {name1} reads {8-45} pages a day. How many days are needed for a book of {180-900} pages? ~ A farmer has {5-40} cows and {10-90} hens. How
many legs are there in total? ~ {name1} saves ${3-25} each week, and {name2} saves ${3-25}. How much do they have together after {4-30} weeks? ~ A tank holds {200-900} litres. It fills at {5-25} litres a minute and leaks {1-4} litres a
minute. How long until it is full? ~ A {good} costs ${40-300} and is reduced by {5-60}%. What is the new price? ~ After a rise of {3-25}%, the rent is ${600-1900}. What was it before? ~ {name1} is {3-15} years older than {name2}.
Together they are {30-90} years old. How old is each? ~ A baker makes {4-20} trays with {6-24} rolls each and sells {20-90}% of them. How many rolls are left? ~ There are {3-9} boxes with {4-30} {thing1} in each, and {2-30} {thing1} on
the table. How many {thing1} are there? ~ {name1} runs {3-12} km on {day1} and twice as far on {day2}. How far is that in total? ~ A class of {18-36} pupils has {3-8} more girls than boys. How many girls are there? ~ {name1} works {4-9}
hours a day for {3-6} days a week and earns ${11-45} an hour. What is the income in {2-8} weeks? ~ A recipe for {2-6} people needs {150-700} g of flour. How much is needed for {7-20} people? ~ A rope of {12-95} m is cut into pieces of
{2-7} m. How many whole pieces are there, and what is left over? ~ Two cyclists start {30-180} km apart and ride towards each other at {14-26} and {14-30} km/h. When do they meet? ~ {name1} bought {2-9} {thing1} for ${1-6} each and
{2-9} {thing2} for ${1-6} each. What was the total? ~ A cinema has {9-30} rows of {10-32} seats. If {30-250} seats are empty, how many people are there? ~ {name1} painted a third of a fence in {2-7} hours. How long does the whole fence
take for {2-5} people at that pace? ~ A phone plan costs ${8-30} a month plus ${1-5} per gigabyte. How much do {3-20} gigabytes cost in {2-12} months? ~ The average of {3-6} numbers is {10-70}. If one more number, {5-99}, is added, what
is the new average? ~ A garden is {6-40} m long and {4-25} m wide. How much does a fence cost at ${5-40} per metre? ~ {name1} has {4-30} coins worth 5 cents and {4-30} coins worth 20 cents. How much money is that? ~ A bus starts with
{10-45} passengers. At each of {2-6} stops, {2-5} get off and {1-9} get on. How many are on board at the end? ~ A plant is {5-40} cm tall and grows {2-9} mm a day. How tall is it after {10-80} days? ~ {name1}, {name2} and {name3} share
${60-900} in the ratio {1-3}:{2-5}:{3-7}. How much does each get? ~ A car uses {5-11} litres per 100 km, and fuel costs ${1-3} per litre. What does a trip of {120-950} km cost? ~ {name1} scored {40-95}, {40-95} and {40-95} in three
tests. What is needed in the fourth for an average of {70-90}? ~ A company had {120-900} employees, hired {10-90}, and then {5-40} left each month for {2-5} months. How many remain? ~ A pool is emptied by one pump in {3-9} hours and by
another in {4-14} hours. How long do both take together? ~ ${500-9000} is invested at {2-9}% a year. How much is it after {2-10} years with compound interest? ~ {name1} mixes {2-9} litres of juice with {20-80}% fruit and {2-9} litres
with {10-90}% fruit. What is the share of fruit in the mix? ~ A library lends {40-300} books on {day1}, and {5-40} fewer on each of the next {2-4} days. How many books were lent in all? ~ A clock loses {2-9} minutes a day. How wrong is
it after {2-9} weeks? ~ How many {thing1} can {name1} buy with ${20-150} if {2-6} of them cost ${3-17}? ~ A ladder of {3-12} m leans on a wall with its foot {1-2} m away. How high does it reach? ~ Solve for x: {2-19}x + {1-60} =
{61-300}. ~ Solve the equation {2-9}(x - {1-12}) = {1-9}x + {3-50}. ~ Solve x^2 - {3-20}x + {1-60} = 0. ~ Solve the system: {2-9}x + {1-9}y = {10-90}, x - y = {1-9}. ~ What is {12-99} times {12-99}, minus {100-900}? ~ Compute {100-999}
+ {100-999} * {2-19}. ~ What is {5-95}% of {40-2000}? ~ Simplify {2-9}/{10-40} + {1-9}/{3-30}. ~ A triangle has sides of {3-12}, {8-13} and {9-14} cm. What is its perimeter, and what is its area? ~ What is the area of a circle with a
radius of {2-40} cm? ~ A cylinder has a radius of {2-15} cm and a height of {4-40} cm. What is its volume? ~ Two angles of a triangle are {20-80} and {20-80} degrees. What is the third? ~ A box measures {2-30} by {2-30} by {2-30} cm.
What are its volume and surface? ~ A bag holds {2-12} red, {2-12} blue and {1-9} green balls. Two are drawn. What is the probability that both are red? ~ Two dice are rolled. What is the probability that the sum is {3-11}? ~ A coin is
tossed {3-9} times. What is the probability of exactly {1-3} heads? ~ In how many ways can {3-7} people of {8-12} be chosen? ~ What is the derivative of {2-9}x^{3-8} + {2-30}x - {1-99}? ~ What is the integral of {2-12}x^{2-6} from 0 to
{1-9}? ~ What is the sum of all whole numbers from {1-20} to {50-400}? ~ Find the greatest common divisor of {24-400} and {18-600}. ~ Find the least common multiple of {4-48} and {6-60}. ~ Is {101-1999} a prime number? Show how you
check it. ~ The sequence starts with {1-9}, and each term is {2-5} times the last one plus {1-7}. What is the {4-8}th term? ~ If f(x) = {2-9}x - {1-9} and g(x) = x^2 + {1-9}, what is f(g({1-6}))? ~ Convert {20-255} to binary and to
hexadecimal. ~ A line goes through ({0-9}, {0-9}) and ({10-20}, {1-30}). What are its slope and equation? ~ {name1} wants to tile a floor of {3-9} by {3-9} m with tiles of {20-60} cm. How many tiles are needed?""")
CODING = lines("""!write a {plang} function that {ctask}.{ctail} ~ !write a {plang} program that {ctask}, with comments. ~ !write tests for a {plang} function that {ctask}. ~ !show me two ways to write a {plang} function that {ctask}, and compare them. ~
I need some {plang} code that {ctask}.{ctail} ~ {plang} code that {ctask} plz ~ How do I write code that {ctask} in {plang}?{ctail} ~ What is the time complexity of a function that {ctask}? Show the code in {plang}. ~ !explain {concept}
in {plang} {form}. ~ !explain {concept} with an example in {plang}. ~ When should I use {concept1}, and when {concept2}?{tail} ~ What does this code do?@@{code} ~ !find the bug in this code and fix it.@@{code} ~ !explain this code line
by line.@@{code} ~ !rewrite this in {plang}.@@{code} ~ !add comments and better names to this code:@@{code} ~ !make this code safer and add error handling for bad input:@@{code} ~ What is the output of the following?@@{code} ~ !write an
SQL query that lists the {3-20} {table} with the highest {column}. ~ !write an SQL query: count the {table1} per {column1} where {column2} is above {2-500}. ~ !write an SQL query that joins {table1} and {table2} and shows the average
{column} of each group. ~ !design the SQL tables for an app that manages {table1} and {table2}. Add {column} where it fits. ~ !write a bash command that finds all files larger than {2-900} MB and older than {2-90} days. ~ !write a
regular expression that matches a {column} such as {10-999}-{A}{B}. Explain each part. ~ !complete this Python function:@@{stub} ~ !write a class in {plang} for {table}, with {column1}, {column2} and a method to print them. ~ !write a
JSON example for {table} with {column1}, {column2} and {2-6} records, and {plang} code that reads it. ~ !write a small web page with HTML and CSS that shows a list of {table} and a button to sort by {column}. ~ My {plang} program is
slow when it {ctask}. How can I make it faster?""")
WORDS["ctail"] = ["", "", "", " Explain how it works.", " Only the code, please.", " Include an example call.", " Handle the empty input too.",
                  " Use no libraries.", " Keep it as short as possible.", " Add type annotations if the language has them."]
WORDS["stub"] = ['def {verb}_{table}(items, {column1}):\n    """Returns the items whose {column1} is more than {2-99}."""']
WORDS["verb"] = ["filter", "select", "pick", "find", "big"]
WORDS["A"] = list("ABCDEFGH")
WORDS["B"] = list("KLMNPQRS")
WRITING = lines("""!write a {tone} email about {message}.{tail} ~ !draft a {tone} letter about {message}. ~ Subject: {message}. Can you write the email for me, in a {tone} way? ~ !write a blog post about {topic} for {audience}.{tail} ~ !write the
introduction of an essay about {topic}.{tail} ~ !write an outline for an article on {topic1} and {topic2}. ~ !write a {tone} review of a {good} that I bought for ${10-300}.{tail} ~ !write a product description for a {good} made in
{country}, {form}. ~ !write a short story about {scene}.{tail} ~ !write a story that begins with: "{name} had never been to {city} before."{tail} ~ !write the first page of a novel about {scene}. ~ !write a poem about {topic}.{ptail} ~
!write a poem about {scene}.{ptail} ~ !write a {tone} speech about {topic} for {occasion}. ~ !write a toast by a {job} for {occasion}. ~ !write a dialogue between a {job1} and a {job2} about {topic}. ~ !write a dialogue between
{famous1} and {famous2} about {hard}. ~ !write a travel guide for {3-10} days in {city}, {form}. ~ !make a plan for {occasion} with {8-90} guests and a budget of ${200-5000}. ~ !write a press release about a new {good} from a company in
{city}. ~ !write {3-8} slogans for a shop in {city} that sells a {good}. ~ !write {3-8} titles for an article about {topic}. ~ !write a social media post about {everyday}, {form}. ~ !write a job advertisement for a {job} in {city}. ~
!write a diary entry of a {job} on a bad {day}. ~ !write a fable with a {animal1} and a {animal2}. It should end with a moral.{tail} ~ !write a scene for a play about {scene}.{tail} ~ !write song lyrics about {everyday} in a {tone}
style. ~ !write an opinion piece against {society}, and then one in favour of it. ~ !write a news report about a {animal} that escaped in {city}.{tail} ~ !write a lesson plan on {hard} for {audience}. ~ !write a recipe that uses
{food1}, {food2} and {food3}.{tail} ~ !write a biography of {famous} {form}. ~ !write a critique of a film about {scene}. ~ !write a cover letter: I am a {job1}, and want to work as a {job2} in {city}. ~ !continue: "On that {day} in
{city}, the {job} noticed something strange:"{tail} ~ i have to give a talk on {topic} next {day}, write it for me.{tail} ~ !write a riddle whose answer is "{animal}", and a second one about {everyday}.""")
WORDS["ptail"] = ["", "", " It should rhyme.", " Use {2-6} stanzas.", " No rhymes, please.", " Make it a haiku.", " Make it a sonnet.", " Make it funny.", " In the style of a lullaby."]
WORDS["occasion"] = split("a retirement party; a school opening; a wedding; a graduation; a team meeting; a birthday; a conference in {city}; a town council; a charity evening; a farewell")
WORDS["food"] = split("rice; eggs; tomatoes; lentils; chicken; potatoes; spinach; mushrooms; pasta; beans; carrots; cheese; apples; fish; onions; yoghurt; peppers; chickpeas; oats; pumpkin")
ROLE = lines("""You are a {persona}. I ask you about {topic}. What do you say? ~ You are a {persona}. Introduce yourself and tell me about your day.{tail} ~ Pretend to be a {persona} and explain {topic} to {audience}. ~ Act as a {persona}. My first
question is: how do I {goal}? ~ Act as a {job} who advises people. I want to {goal}. Ask me questions first. ~ Imagine you are {famous}. How would you describe {technology}?{tail} ~ Speak as {famous} and answer: what do you think of
{topic}? ~ Let's play a game: you are a {persona}, I am a {job}. You open the conversation in {city}. ~ From now on you are a {persona} who loves {everyday}. Convince me to try it. ~ You are an interviewer for a {job} position. Ask me
{3-8} questions and say what a good answer contains. ~ Be my {lang} teacher for a lesson about {everyday}. Stay in your role. ~ You're a {persona} and you just met a {persona2}. Write down what you say to each other. ~ Take the role of
a {persona} and write a complaint about {everyday}. ~ Suppose you were a {animal} for one day in {city}. Describe it in the first person.{tail} ~ roleplay: ur a {persona}, im lost in {city}. go ~ As a {persona}, give me your honest
opinion on {topic}. Stay in character.""")
REASON = lines("""!compare {compare} {form}. ~ What are the pros and cons of {topic}?{tail} ~ !list the advantages and disadvantages of {compare}. ~ Should schools teach {everyday1}? Give arguments for both sides.{tail} ~ Which is better for {audience}:
{sport1} or {sport2}? Explain your choice. ~ {name1} is taller than {name2}. {name2} is taller than {name3}. {name4} is shorter than {name3}. Who is the {end}? ~ {name1}, {name2} and {name3} work as a {job1}, a {job2} and a {job3}.
{name1} is not the {job1}. {name2} is neither the {job1} nor the {job2}. Who does what? ~ Every {animal1} in {city1} is green. {name1} owns a {animal1} in {city1}. Is it green? Explain the logic. ~ Some {job1}s are {job2}s, and no
{job2} likes {everyday1}. Can a {job1} like it? Explain. ~ If today is {day}, which day is it in {8-200} days? ~ {name1} left home at {6-11}:{10-55} and walked {15-95} minutes to the {place}. Waiting there took {5-40} minutes. When
could the visit begin? ~ What comes next: {1-5}, {6-10}, {11-15}, {16-20}? Give your reasoning, and say if there is more than one answer. ~ In a race, {name1} finished before {name2} but after {name3}. {name4} finished last. Give the
order. ~ Is this argument valid? "{city1} has many {job1}s. {name1} lives in {city1}. So {name1} is a {job1}." ~ Find the flaw: "Since I started {everyday1}, I have not been ill. So it prevents {health}." ~ The odd one out: {animal1},
{animal2}, {food}, {animal3}. Which one, and why? ~ {name1} faces {name_dir}, turns right {1-3} times and then left {1-3} times. Which direction is that? ~ What would happen if {everyday1} became illegal in {country}? Think it through.
~ What would the world look like without {technology}?{tail} ~ A {job1} found the window open, a wet floor and a missing {good}. What are {2-5} explanations, and which is the most likely? ~ You have {2-9} {thing1}, and take away {1-2}
of them. How many do you have? Careful: explain. ~ I must choose between a job as a {job1} in {city1} and one as a {job2} in {city2}. Help me decide. ~ {name1}'s mother has {3-6} children, and {name1} has {1-2} brothers. How many
sisters does {name1} have? ~ What is the strongest argument against {philosophy}?{tail} ~ How would you estimate the number of {job1}s in {city1}? Show your steps. ~ Rank these from the most to the least useful for {audience}:
{everyday1}, {everyday2}, {everyday3}. Explain. ~ Complete the analogy and explain it: {animal1} is to {place} as {job1} is to ...""")
WORDS["end"] = ["tallest", "shortest"]
WORDS["name_dir"] = ["north", "south", "east", "west"]
WORDS["place"] = split("station; library; museum; hospital; market; office; stadium; bank; theatre; bakery")
RECORDS = lines("""{name} {surname}, {19-78}, {job} from {city}, joined on {1-28} {month} {1998-2024} and earns ${1500-7900} a month. ~ Order {1000-9999}: {2-9} x {good}, ${5-90} each, shipped to {name} {surname} in {city} on {1-28} {month}. ~ {name}
{surname} called on {day} at {8-18}:{10-55} about a {good} that was {state}. The case number is {10000-99999}. ~ Flight {A}{B}{100-999} from {city1} to {city2} leaves at {5-22}:{10-55} on {1-28} {month}, and a seat costs ${60-900}. ~
The {place} in {city} is open from {7-10} to {16-21}, is closed on {day}, and a ticket costs {3-25} euros. ~ Invoice {1000-9999} to {surname} Ltd, {city}: {3-40} hours at ${30-120}, due on {1-28} {month}.""")
REVIEWS = lines("""I bought this {good} in {month}. It {verdict}. {reason} ~ The {good} arrived after {2-20} days. {reason} Still, it {verdict}. ~ {reason} For ${10-200} I expected something else. The {good} {verdict}. ~ My daughter loves the {good}, but
the box was {state}. It {verdict}. {reason} ~ We stayed {2-9} nights in {city}. The room was {state}. {reason} ~ {name} from the support team answered within {2-40} hours. {reason} The {good} {verdict}.""")
WORDS["state"] = split("broken; late; dirty; excellent; the wrong colour; missing a part; very clean; smaller than expected; damaged; perfect")
WORDS["verdict"] = split("works fine; stopped working after {2-30} days; is worth the money; is far too small; does what it should; looks cheap; is better than my old one; makes a strange noise; feels solid")
WORDS["reason"] = split("I would buy it again.; The instructions were hard to read.; Shipping was quick.; I want my money back.; The colour is lovely.; Nobody answered my emails.; The staff were kind.; The price has gone up since.; It was a gift from {name}.; I am not sure yet.")
WORDS["record"] = RECORDS
WORDS["review"] = REVIEWS
EXTRACT = lines("""!extract the names, places and numbers from this text as JSON.@@{record1} {record2} ~ !turn these lines into a CSV table with a header.@@{record1}@{record2}@{record3} ~ !make a table out of the following
notes.@@{record1}@{record2}@{record3} ~ {record1} {record2}@@List all dates, times and amounts of money in the text above. ~ {review1}@@Is this review positive, negative or mixed? Give a reason. ~ !classify each review as positive,
neutral or negative. Answer as a JSON list.@@1. {review1}@2. {review2}@3. {review3} ~ !rate each of these reviews from 1 to 5, one line each:@- {review1}@- {review2}@- {review3} ~ !extract the product, the problem and the customer's
wish.@@{review1} ~ Text: {record1}@Fields: who, what, where, when. Fill in the fields. ~ From the text below, who is mentioned, and what do we learn about each?@@{record1} {record2} ~
city,country,visitors@{city1},{country1},{100-900}@{city2},{country2},{100-900}@{city3},{country3},{100-900}@@Which row has the most visitors? Return the table as JSON, sorted. ~ item | price | stock@{good1} | {5-90} | {0-40}@{good2} |
{5-90} | {0-40}@{good3} | {5-90} | {0-40}@@What is the total value of the stock, and which items are sold out? ~ Sort these words into groups and name the groups: {animal1}, {food1}, {job1}, {animal2}, {food2}, {job2}, {instrument}. ~
What is the topic of this message: travel, work, shopping or health? "{review1}" ~ !write a one-line summary of each note:@{record1}@{record2}@{review1} ~ !mark every person with [P] and every place with [L] in: {record1} {record2} ~
!answer from the notes only: what happened in {city}?@@{record1}@{record2}@{record3} ~ !convert to YAML: {record1} ~ !find the keywords of this text and translate none of them: {review1} {review2} ~ Which of these are facts, and which
are opinions?@@{record1} {review1} {record2}""")
for key, text in {
    "de_wer": "der Bürgermeister; die junge Ärztin; mein Nachbar; die Firma; der Minister; unsere Lehrerin; das Museum; der Verein; ein Sprecher der Polizei; die Familie; die Gewerkschaft; der alte Fischer; die Universität",
    "de_tut": "plant ein neues Projekt; eröffnet eine Ausstellung; sucht eine bessere Lösung; arbeitet an einem Bericht; verkauft frisches Gemüse; feiert ein großes Fest; spricht über die Zukunft; baut eine Schule; hilft den Kindern; verliert viel Geld; schreibt einen langen Brief; gewinnt einen Preis",
    "de_wann": "im Sommer; seit drei Jahren; am Montag; jeden Morgen; nächste Woche; am Abend; im vergangenen Jahr; zum ersten Mal; nach dem Krieg; heute; im Dezember",
    "de_wo": "in der Altstadt; auf dem Land; in Hamburg; am Bahnhof; in den Bergen; an der Küste; im Norden des Landes; vor dem Rathaus; in einem kleinen Dorf; in der Schweiz",
    "de_weil": "die Preise stark gestiegen sind; das Wetter schlecht ist; viele Menschen Arbeit suchen; die Straße gesperrt ist; es keine andere Möglichkeit gibt; die Nachfrage sinkt; die Wähler unzufrieden sind; der Winter früh beginnt; niemand die Wahrheit kennt",
    "de_folge": "steigt die Zahl der Besucher; sinken die Kosten; leben die Menschen länger; wird weniger Strom verbraucht; fehlen tausend Wohnungen; müssen die Bürger mehr Steuern zahlen; bleibt die Grenze offen",
    "fr_qui": "le maire; ma sœur; le vieux professeur; la petite fille; notre voisin; l'entreprise; la ministre; le boulanger; un journaliste; la commune",
    "fr_fait": "prépare un voyage; ouvre un nouveau magasin; cherche une solution; lit un livre ancien; vend des légumes; parle de l'avenir; construit un pont; attend une réponse; oublie toujours ses clés",
    "fr_quand": "chaque matin; depuis deux ans; en été; la semaine prochaine; après le dîner; le dimanche; pour la première fois",
    "fr_ou": "à Paris; près de la gare; dans le jardin; au bord de la mer; à la campagne; dans un petit village; en Belgique",
    "es_quien": "el alcalde; mi hermana; la profesora; el viejo pescador; nuestro vecino; la empresa; una periodista; el médico; la abuela",
    "es_hace": "prepara una fiesta; abre una tienda nueva; busca una solución; lee un libro antiguo; vende fruta; habla del futuro; construye una casa; espera una respuesta; escribe una carta",
    "es_cuando": "cada mañana; desde hace dos años; en verano; la próxima semana; después de cenar; los domingos; por primera vez",
    "es_donde": "en Madrid; cerca de la estación; en el jardín; junto al mar; en el campo; en un pueblo pequeño; en Chile",
    "en_s": "Where is the nearest {place}?; I would like to buy a {good}.; My brother works as a {job} in {city}.; The meeting starts at {8-18} on {day}.; We have been living in {city} for {2-30} years.; It will rain on {day}.; How much does this {good} cost?; She lost her {good} at the {place}.; Could you help me find the {place}?; The {job} and the {job} are good friends.",
}.items():
    WORDS[key] = split(text)
WORDS["fr_satz"] = ["{fr_qui} {fr_fait} {fr_ou} {fr_quand}.", "{fr_quand}, {fr_qui} {fr_fait} {fr_ou}.", "{fr_qui1} {fr_fait1} {fr_ou}, mais {fr_qui2} {fr_fait2}."]
WORDS["es_satz"] = ["{es_quien} {es_hace} {es_donde} {es_cuando}.", "{es_cuando}, {es_quien} {es_hace} {es_donde}.", "{es_quien1} {es_hace1} {es_donde}, pero {es_quien2} {es_hace2}."]
LANGUAGES = [("German", "de"), ("German", "de"), ("German", "de"), ("French", "fr"), ("Spanish", "es")]
TRANSLATE = lines("""Translate {L} to English: {s} ~ Translate the following {L} text into English.@@{s} ~ What does this mean in English? "{s}" ~ Give the English translation of this {L} sentence: {s} ~ {s}@@Please translate the above from {L}. ~ I got
this message in {L}: "{s}" What does it say? ~ {L}: {s}@English: ~ put this in english pls: {s} ~ How would you say this in natural English? {s} ~ Turn this {L} text into English and explain the hardest words. {s} {s} ~ English version,
please, without comments: {s} ~ A friend wrote to me in {L}. Translate it word by word, and then freely: {s} ~ Into English: {s} {s} ~ Rewrite in English ({L} original): {s}""")
TRANSLATE_TO = lines("""!translate into {tolang}: {en_s} ~ How do I say "{en_s}" in {tolang}? ~ !translate this dialogue into {tolang}.@- {en_s1}@- {en_s2} ~ !give the {tolang} translation of: {en_s1} {en_s2}""")
WORDS["tolang"] = ["German", "French", "Spanish", "Italian"]
ADVICE = lines("""How can I {goal}?{tail} ~ How do I {goal}? Answer {form}. ~ !give me {3-10} tips to {goal}.{tail} ~ !give a beginner a plan of {2-12} weeks to {goal}. ~ What mistakes do people make when they try to {goal}?{tail} ~ I'm a {job} and I
want to {goal}. Where do I start?{tail} ~ I have {2-20} hours a week and ${20-900}. What is the best way to {goal}? ~ !make a checklist for someone who wants to {goal}. ~ My friend {name} wants to {goal}, but has no time. Any
advice?{tail} ~ I tried to {goal} for {2-12} months and failed. What now?{tail} ~ Is it a good idea to {goal} and to {goal2} at the same time? ~ how 2 {goal} ~ What do I need to {goal}?{tail} ~ !recommend books, tools or websites to
{goal}. ~ Someone in {city} told me it is impossible to {goal}. Is that so?{tail} ~ What should I do if I want to {goal} but feel nervous about it?{tail}""")
KINDS = [("open", 18, OPEN), ("trivia", 12, TRIVIA), ("math", 12, MATH), ("coding", 10, CODING), ("writing", 13, WRITING),
         ("roleplay", 6, ROLE), ("reasoning", 7, REASON), ("extraction", 7, EXTRACT), ("translation", 8, TRANSLATE), ("advice", 7, ADVICE)]

POLITE = ["Please {}", "Could you {}", "Can you {}", "I need you to {}", "I'd like you to {}", "Hi! Please {}", "Hello, can you {}",
          "Would you {}", "Help me with this: {}", "Your task: {}", "Hey, could you {}", "Kindly {}"]
SLOPPY = [(r"\bplease\b", "pls"), (r"\byou\b", "u"), (r"'", ""), (r"\bbecause\b", "cuz")]


def fill(rng, text, memo):
    """Replaces the slots of a template."""
    def value(match):
        slot = match.group(1)
        numbers = re.fullmatch(r"(\d+)-(\d+)", slot)
        if numbers:
            return str(rng.randint(int(numbers[1]), int(numbers[2])))
        key = re.sub(r"\d+c?$", "", slot)
        if key not in WORDS:
            return match.group(0)
        if slot == key:
            return fill(rng, rng.choice(WORDS[key]), memo)
        slot = slot.rstrip("c")
        if slot not in memo:
            used = [memo[other] for other in memo if re.sub(r"\d+$", "", other) == key]
            for _ in range(20):
                memo[slot] = fill(rng, rng.choice(WORDS[key]), {})
                if memo[slot] not in used:
                    break
        return memo[slot]
    return re.sub(r"\{([A-Za-z_]+\d*c?|\d+-\d+)\}", value, text)


def german(rng):
    """German sentences, whose verb comes second: "am Montag plant der Verein ..."."""
    pick = lambda key: fill(rng, rng.choice(WORDS[key]), {})
    who, when, where, why, then = (pick(key) for key in ("de_wer", "de_wann", "de_wo", "de_weil", "de_folge"))
    verb, rest = pick("de_tut").split(" ", 1)
    return rng.choice([f"{who} {verb} {when} {where} {rest}.", f"{when} {verb} {who} {where} {rest}.",
                       f"{who} {verb} {where} {rest}, weil {why}.", f"obwohl {why}, {verb} {who} {when} {rest}.",
                       f"laut einer neuen Studie {then}, wenn {why}.",
                       f"nach Angaben der Behörden {then}. {capital(who)} {verb} deshalb {where} {rest}."]
                      if verb not in ("spricht", "arbeitet", "hilft") else
                      [f"{who} {verb} {when} {where} {rest}.", f"{when} {verb} {who} {rest}."])


def capital(text):
    return text[:1].upper() + text[1:]


def finish(rng, text, loose=True):
    """Makes a filled template a prompt: wraps commands, and sometimes writes like a hurried user."""
    command = text.startswith("!")
    text = text.lstrip("!")
    if command and rng.random() < 0.4:
        wrap = rng.choice(POLITE)
        if re.search(r"^(Could|Can|Would|Hey|Hello)", wrap):
            text = re.sub(r"[.:](?=@@|@|$| [A-Z])", "?", text, count=1) if '"' not in text else text
        text = wrap.format(text) if "{" not in text else wrap.replace("{}", text)
    text = re.sub(r"\b([Aa]) (?=(?!one\b|one-)(?:[aeioAEIO]|umbr))", r"\1n ", capital(text.strip())).replace("@", "\n").replace("..", ".")
    if loose and "\n" not in text and rng.random() < 0.12:
        text = text.lower().rstrip(".?")
        for pattern, other in SLOPPY:
            text = re.sub(pattern, other, text)
    return text


def prompt(rng, kind, templates):
    if kind == "translation":
        if rng.random() < 0.15:
            return finish(rng, fill(rng, rng.choice(TRANSLATE_TO), {}))
        language, code = rng.choice(LANGUAGES)
        text = rng.choice(TRANSLATE).replace("{L}", language)
        while "{s}" in text:
            one = german(rng) if code == "de" else fill(rng, rng.choice(WORDS[code + "_satz"]), {})
            text = text.replace("{s}", capital(one), 1)
        return finish(rng, text, loose=False)
    text = rng.choice(templates)
    if kind == "trivia":
        text = rng.choice(["", "", "", "", "", "Quick question: ", "Do you know: ", "Quiz: ", "Q: ", "Tell me, ", "Trivia: "]) + text
        text += rng.choice(WORDS["qtail"])
    return finish(rng, fill(rng, text, {}), loose=kind not in ("coding", "extraction"))


def schedule(kinds):
    """The kinds in turn, each as often as its weight says."""
    credit = [0.0] * len(kinds)
    total = sum(weight for _, weight, _ in kinds)
    while True:
        for i, (_, weight, _) in enumerate(kinds):
            credit[i] += weight / total
        best = max(range(len(kinds)), key=credit.__getitem__)
        credit[best] -= 1
        yield kinds[best]


def prompts(count, seed):
    rng = random.Random(seed)
    seen = set()
    for kind, _, templates in schedule(KINDS):
        if len(seen) >= count:
            return
        for _ in range(50):
            text = prompt(rng, kind, templates)
            if text not in seen:
                seen.add(text)
                print(json.dumps({"id": f"{kind}-{seed}-{len(seen)}", "category": kind, "prompt": text}, ensure_ascii=False))
                break


FOLLOW = [
    ("summarization", 22, lines("""!summarize the text below {form}.@@{T} ~ {T}@@TL;DR ~ !give {3-5} key points of this text.@@{T} ~ What is the main message of the following article?@@{T} ~ {T}@@!sum up the above in {1-4} sentences. ~ I have no time to read this. What
does it say?@@{T} ~ !write a summary of at most {30-90} words for {audience}.@@Article:@{T} ~ !shorten this to a headline and a summary:@@{T} ~ Article: {T}@@Summary:""")),
    ("rag", 24, lines("""!use only the passages below to answer the question: {Q}@@{P} ~ Here are some search results.@@{P}@@Question: {Q}@Answer: ~ {P}@@With the help of these sources, {Q} Say which source you used. ~ I found these notes:@{P}@@My question is:
{Q} ~ Documents:@{P}@@!answer from the documents: {Q} If they do not say, tell me so. ~ Question: {Q}@Context:@{P}@Answer in {1-4} sentences.""")),
    ("extraction", 12, lines("""!extract all names, places and numbers from the text as JSON.@@{T} ~ {T}@@List the people and places that are mentioned above. ~ Which facts and which opinions are in this text? Make two lists.@@{T} ~ !pick the {4-9} most important
words of this text and define each.@@{T} ~ !turn the content of this text into a table:@@{T}""")),
    ("rewriting", 16, lines("""!rewrite this text so that it is half as long.@@{T} ~ !rewrite the following in a more formal style:@@{T} ~ !turn this text into a dialogue between a {job1} and a {job2}.@@{T} ~ !explain this text to a child:@@{T} ~ {T}@@!say the same
in a {tone} way. ~ !rewrite this as a letter to {name}:@@{T} ~ !turn it into bullet points.@@{T}""")),
    ("continuation", 8, lines("""!continue this text with one more paragraph.@@{H} ~ {H}@@What comes next? ~ !finish the text.@@{H}""")),
    ("evaluation", 8, lines("""Is there anything wrong in this text? Correct it.@@{T} ~ A student gave this answer to "{Q}":@@{T}@@!grade it from 1 to 10 and give reasons. ~ What is missing in this text?@@{T} ~ !argue against this text:@@{T}""")),
    ("titles", 5, lines("""!suggest a title and {3-6} tags for this text.@@{T} ~ {T}@@Which title would fit? Give {2-5} ideas.""")),
    ("translation", 5, lines("""!translate this passage into {tolang}.@@{H} ~ {H}@@In {tolang}, please.""")),
]


def follow(count, seed):
    rng = random.Random(seed)
    answers = []
    for line in sys.stdin:
        answer = json.loads(line)
        answer["prompt"] = re.sub(r"^(Quick question|Do you know|Quiz|Q|Trivia|Tell me)[:,] ", "", answer["prompt"].strip())
        if 40 <= len(answer["text"].split()) <= 350:
            answers.append((answer["prompt"].strip(), answer["text"].strip()))
    if not answers:
        sys.exit("no answer has 40 to 350 words")
    asked = [(capital(question), text) for question, text in answers if question.endswith("?") and len(question) < 160 and "\n" not in question]
    seen = set()
    tries = 0
    for kind, _, templates in schedule(FOLLOW):
        tries += 1
        if len(seen) >= count or tries > 20 * count + 100:
            break
        template = rng.choice(templates)
        question, text = rng.choice(asked if asked and "{Q}" in template else answers)
        passages = [text] + [rng.choice(answers)[1] for _ in range(rng.choice([0, 1, 2]))]
        passages = list(dict.fromkeys(passages))
        rng.shuffle(passages)
        label = rng.choice(["[{}] ", "{}. ", "Passage {}: ", "Source {}: ", "({}) "])
        if len(" ".join(passages).split()) > 700:
            passages = [text]
        words = text.split(" ")
        head = " ".join(words[:rng.randint(25, 60)]) if len(words) > 60 else text
        # The slots of the texts are filled last, so that no brace of a text is taken for a slot.
        result = finish(rng, fill(rng, template, {}), loose=False)
        if not question.endswith("?"):
            question = "what do the texts say about their topic?"
        values = {"T": text, "H": head, "Q": question,
                  "P": "\n\n".join(label.format(i + 1) + passage for i, passage in enumerate(passages))}
        result = re.sub(r"\{([THQP])\}", lambda match: values[match[1]], re.sub(r"(^|\n)!([a-z])", lambda match: match[1] + match[2].upper(), result))
        result = re.sub(r"(\n\n)([a-z])", lambda match: match[1] + match[2].upper(), result) if template.startswith("{T}") else result
        if result not in seen:
            seen.add(result)
            print(json.dumps({"id": f"follow-{kind}-{seed}-{len(seen)}", "category": kind, "prompt": result}, ensure_ascii=False))


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("prompts", "follow"):
        sys.exit(__doc__)
    count, seed = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) == 4 else 1
    (prompts if sys.argv[1] == "prompts" else follow)(count, seed)


if __name__ == "__main__":
    main()
