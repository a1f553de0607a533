"""A hundred schemas as applications send them: extraction, classification, tool arguments, records, trees.

Strings and lists are bounded, so that a small model comes to an end.
"""


def text(most=24, least=0, **more):
    return {"type": "string", "minLength": least, "maxLength": most, **more} if least else {
        "type": "string", "maxLength": most, **more}


def pattern(regex):
    return {"type": "string", "pattern": regex}


def form(name):
    return {"type": "string", "format": name}


def one(*values):
    return {"enum": list(values)}


def whole(least=None, most=None, **more):
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{k: v for k, v in bounds.items() if v is not None}, **more}


def number(least=None, most=None):
    return {**whole(least, most), "type": "number"}


def many(items, most=3, least=0):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def either(*schemas):
    return {"anyOf": list(schemas)}


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def record(optional=(), **fields):
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def tagged(**variants):
    return {"oneOf": [
        {**schema, "properties": {"kind": {"const": kind}, **schema["properties"]},
         "required": ["kind", *schema["required"]]}
        for kind, schema in variants.items()]}


NULL = {"type": "null"}
FLAG = {"type": "boolean"}
DATE, TIME, MAIL, UUID, URL = form("date"), form("date-time"), form("email"), form("uuid"), {
    "type": "string", "pattern": r"^https?://[a-z]{1,12}\.(com|org|net)(/[a-z0-9]{0,8})?$"}
MONEY = record(amount=number(0, 1e6), currency=one("EUR", "USD", "GBP", "JPY"))
ADDRESS = record(street=text(20), city=text(12), zip=pattern(r"^[0-9]{5}$"), country=one("DE", "FR", "US", "JP"))
POINT = record(lat=number(-90, 90), lon=number(-180, 180))
PERSON = record(first=text(12, 1), last=text(12, 1), born=either(DATE, NULL))

SCHEMAS = {
    # Classification and judgement.
    "sentiment": record(label=one("positive", "negative", "neutral"), confidence=number(0, 1)),
    "spam": record(is_spam=FLAG, reason=text(40)),
    "topic": record(topics=many(one("sport", "politics", "science", "art"), 3, 1)),
    "language": record(code=pattern("^[a-z]{2}$"), name=text(12)),
    "toxicity": record(scores=record(insult=whole(0, 5), threat=whole(0, 5), hate=whole(0, 5)), blocked=FLAG),
    "grade": record(points=whole(0, 100), grade=one("A", "B", "C", "D", "F"), feedback=text(60)),
    "rating": record(stars=whole(1, 5), title=text(24), pros=many(text(16)), cons=many(text(16))),
    "preference": record(winner=one("a", "b", "tie"), margin=one("slight", "clear", "large")),
    "intent": record(intent=one("book", "cancel", "ask", "complain"), urgency=whole(1, 3)),
    "fact_check": record(claims=many(record(claim=text(40), verdict=one("true", "false", "unknown")), 2)),
    "triage": record(severity=one("low", "medium", "high", "critical"), team=text(12), duplicate=either(whole(1, 99999), NULL)),
    "yes_no": record(answer=FLAG),
    "choice": one("red", "green", "blue"),
    "score": whole(0, 10),
    "moderation": record(flagged=FLAG, categories=record(violence=FLAG, self_harm=FLAG, sexual=FLAG)),
    # Extraction.
    "person": PERSON,
    "contact": record(name=text(20), email=MAIL, phone=pattern(r"^\+[0-9]{6,12}$"), optional=("phone",)),
    "address": ADDRESS,
    "invoice": record(number=pattern("^INV-[0-9]{4}$"), date=DATE, lines=many(record(item=text(16), quantity=whole(1, 99), price=number(0, 9999)), 3, 1), total=MONEY),
    "receipt": record(shop=text(16), bought=TIME, items=many(record(name=text(12), cents=whole(0, 99999)))),
    "event": record(title=text(24), start=TIME, end=either(TIME, NULL), place=text(16)),
    "meeting": record(subject=text(24), attendees=many(text(12), 4, 1), minutes=whole(5, 240, multipleOf=5)),
    "resume": record(name=text(20), skills=many(text(12), 4), jobs=many(record(title=text(16), company=text(16), years=number(0, 50)), 2)),
    "recipe": record(name=text(20), servings=whole(1, 12), ingredients=many(record(name=text(12), grams=whole(1, 2000)), 4, 1), steps=many(text(40), 3, 1)),
    "citation": record(authors=many(text(16), 3, 1), title=text(40), year=whole(1900, 2030), doi=pattern(r"^10\.[0-9]{4}/[a-z0-9]{1,8}$")),
    "book": record(isbn=pattern("^97[89][0-9]{10}$"), title=text(24), pages=whole(1, 3000), languages=many(pattern("^[a-z]{2}$"), 2)),
    "movie": record(title=text(24), year=whole(1888, 2030), genres=many(one("drama", "comedy", "action"), 2), rating=number(0, 10)),
    "drug": record(name=text(16), dose=record(value=number(0, 1000), unit=one("mg", "ml", "ug")), times_per_day=whole(1, 6)),
    "patient": record(id=UUID, age=whole(0, 130), blood=one("A+", "A-", "B+", "B-", "AB+", "AB-", "0+", "0-"), allergies=many(text(12))),
    "lab": record(test=text(12), value=number(), unit=text(8), range={"type": "array", "prefixItems": [number(), number()], "items": False, "minItems": 2}),
    "house": record(rooms=number(1, 20), area=number(1, 1000), balcony=FLAG, rent=MONEY, address=ADDRESS),
    "car": record(make=text(10), model=text(10), year=whole(1950, 2030), fuel=one("petrol", "diesel", "electric"), plate=pattern("^[A-Z]{1,3}-[A-Z]{2} [0-9]{1,4}$")),
    "flight": record(number=pattern("^[A-Z]{2}[0-9]{2,4}$"), departs=record(airport=pattern("^[A-Z]{3}$"), at=TIME), arrives=record(airport=pattern("^[A-Z]{3}$"), at=TIME)),
    "order": record(id=whole(1), customer=PERSON, items=many(record(sku=pattern("^[A-Z0-9]{6}$"), count=whole(1, 9)), 3, 1), paid=FLAG),
    "ticket": record(title=text(30), labels=many(one("bug", "feature", "docs"), 2), assignee=either(text(12), NULL), estimate=either(number(0, 100), NULL)),
    "commit": record(type=one("fix", "feat", "docs", "test"), scope=either(text(10), NULL), summary=text(50, 1), breaking=FLAG),
    "entities": record(entities=many(record(text=text(16), kind=one("PER", "LOC", "ORG"), start=whole(0, 9999), end=whole(0, 9999)), 3)),
    "relations": record(triples=many({"type": "array", "prefixItems": [text(12), one("owns", "knows", "in"), text(12)], "items": False, "minItems": 3}, 3)),
    "table": record(columns=many(text(10), 3, 1), rows=many(many(either(text(10), number(), NULL), 3), 2)),
    "quote": record(text=text(60), speaker=either(text(16), NULL), page=whole(1, 999), optional=("page",)),
    # Arguments of functions.
    "get_weather": record(location=text(20), unit=one("celsius", "fahrenheit")),
    "search": record(query=text(40, 1), limit=whole(1, 50), filters=record(lang=pattern("^[a-z]{2}$"), safe=FLAG, optional=("lang", "safe"))),
    "send_mail": record(to=many(MAIL, 2, 1), subject=text(30), body=text(80)),
    "set_alarm": record(time=pattern("^([01][0-9]|2[0-3]):[0-5][0-9]$"), repeat=many(one("mo", "tu", "we", "th", "fr", "sa", "su"), 7)),
    "play_music": record(artist=text(16), shuffle=FLAG, volume=whole(0, 100), optional=("shuffle", "volume")),
    "transfer": record(sender=pattern("^[A-Z]{2}[0-9]{10}$"), receiver=pattern("^[A-Z]{2}[0-9]{10}$"), amount=MONEY),
    "calculate": record(operation=one("add", "subtract", "multiply", "divide"), operands=many(number(), 2, 2)),
    "create_user": record(login=pattern("^[a-z][a-z0-9_]{2,11}$"), role=one("admin", "user", "guest"), active=FLAG),
    "sql": record(table=pattern("^[a-z_]{1,12}$"), columns=many(pattern("^[a-z_]{1,12}$"), 3, 1), limit=whole(1, 1000)),
    "http": record(method=one("GET", "POST", "PUT", "DELETE"), url=URL, headers={"type": "object", "additionalProperties": text(12), "maxProperties": 2}),
    "shell": record(command=text(20), args=many(text(10), 3), timeout=either(whole(1, 600), NULL)),
    "move": record(dx=whole(-10, 10), dy=whole(-10, 10), speed=number(0, 5)),
    "click": record(x=whole(0, 1920), y=whole(0, 1080), button=one("left", "right", "middle"), double=FLAG),
    "thermostat": record(room=text(10), target=number(5, 30), until=either(TIME, NULL)),
    "translate": record(source=pattern("^[a-z]{2}$"), target=pattern("^[a-z]{2}$"), text=text(40)),
    "book_table": record(guests=whole(1, 12), day=DATE, hour=whole(11, 23), notes=text(30), optional=("notes",)),
    "route": record(start=POINT, end=POINT, mode=one("car", "bike", "foot")),
    "reminder": record(what=text(30), when=either(TIME, record(after_minutes=whole(1, 10000)))),
    "purchase": record(product_id=UUID, quantity=whole(1, 10), coupon=pattern("^[A-Z]{4}[0-9]{2}$"), optional=("coupon",)),
    "vote": record(poll=whole(1, 9999), option=whole(0, 9)),
    # Settings.
    "server": record(host=pattern("^[a-z]{1,10}$"), port=whole(1, 65535), tls=FLAG, workers=whole(1, 64)),
    "logging": record(level=one("debug", "info", "warn", "error"), file=either(text(20), NULL), rotate=record(size_mb=whole(1, 1000), keep=whole(0, 30))),
    "theme": record(primary=pattern("^#[0-9a-f]{6}$"), dark=FLAG, font=record(family=text(12), size=whole(8, 32))),
    "database": record(driver=one("sqlite", "postgres", "mysql"), pool=record(min=whole(0, 10), max=whole(1, 100)), url=URL, optional=("url",)),
    "cron": record(minute=either({"const": "*"}, whole(0, 59)), hour=either({"const": "*"}, whole(0, 23)), command=text(20)),
    "feature_flags": {"type": "object", "patternProperties": {"^[a-z_]{1,10}$": FLAG}, "additionalProperties": False, "maxProperties": 4},
    "environment": {"type": "object", "additionalProperties": text(10), "maxProperties": 3},
    "package": record(name=pattern("^[a-z]{1,12}$"), version=pattern(r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}$"), license=one("MIT", "Apache-2.0", "GPL-3.0"), private=FLAG),
    "workflow": record(on=many(one("push", "pull_request"), 2, 1), jobs=many(record(name=text(10), runs_on=one("linux", "mac"), steps=many(record(run=text(16)), 2, 1)), 2, 1)),
    "container": record(image=text(16), ports=many(whole(1, 65535), 2), env=many(record(name=pattern("^[A-Z_]{1,8}$"), value=text(8)), 2), restart=one("always", "never")),
    "training": record(lr=number(0, 1), batch=one(8, 16, 32, 64), epochs=whole(1, 100), optimizer=one("sgd", "adam"), warmup=either(whole(0, 1000), NULL)),
    "camera": record(iso=one(100, 200, 400, 800), shutter=pattern("^1/[0-9]{1,4}$"), flash=FLAG),
    # Unions, references and trees.
    "shape": tagged(circle=record(radius=number(0, 100)), rectangle=record(width=number(0, 100), height=number(0, 100)), point=record()),
    "payment": tagged(card=record(last4=pattern("^[0-9]{4}$")), iban=record(iban=pattern("^DE[0-9]{20}$")), cash=record()),
    "action": tagged(say=record(text=text(30)), wait=record(seconds=whole(1, 60)), go=record(direction=one("n", "e", "s", "w"))),
    "message": either(record(role={"const": "user"}, content=text(30)), record(role={"const": "tool"}, result=either(text(20), number(), NULL))),
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": record(value=whole(0, 99), children=many(ref("leaf"), 2)), "leaf": record(value=whole(0, 99))}},
    "expression": {"$ref": "#/$defs/term", "$defs": {"term": either(whole(0, 9), record(op=one("+", "*"), left=ref("atom"), right=ref("atom"))), "atom": either(whole(0, 9), ref("variable")), "variable": pattern("^[a-z]$")}},
    "linked_list": {"$ref": "#/$defs/cell", "$defs": {"cell": record(head=whole(0, 9), tail=either(NULL, ref("cell")))}},
    "family": {"$ref": "#/$defs/person", "$defs": {"person": record(name=text(10), children=many(ref("child"), 2)), "child": record(name=text(10), age=whole(0, 40))}},
    "filesystem": {"$ref": "#/$defs/entry", "$defs": {"entry": either(record(file=text(10), bytes=whole(0, 1 << 20)), record(folder=text(10), entries=many(ref("file"), 2))), "file": record(file=text(10))}},
    "comment": {"$defs": {"user": record(id=whole(1, 9999), name=text(10))}, **record(author=ref("user"), text=text(40), likes=many(ref("user"), 2))},
    "matrix": many(many(number(-9, 9), 3, 3), 3, 3),
    "json_patch": many(either(record(op=one("add", "replace"), path=pattern("^(/[a-z]{1,6}){1,2}$"), value=either(text(8), number())), record(op={"const": "remove"}, path=pattern("^(/[a-z]{1,6}){1,2}$"))), 2, 1),
    "geojson": record(type={"const": "Point"}, coordinates={"type": "array", "prefixItems": [number(-180, 180), number(-90, 90)], "items": False, "minItems": 2}),
    "nullable": record(a=either(text(8), NULL), b={"type": ["integer", "null"], "minimum": 0, "maximum": 9}, c={"type": ["string", "boolean"], "maxLength": 5}),
    "all_of": {"allOf": [{"type": "object", "properties": {"id": whole(1, 99)}, "required": ["id"]}, {"type": "object", "properties": {"name": text(10)}, "required": ["name"]}], "maxProperties": 2},
    "defaults": record(size={**whole(1, 9), "default": 3, "description": "the size", "title": "Size"}, colour={**one("r", "g"), "examples": ["r"]}),
    # Longer answers.
    "quiz": record(questions=many(record(question=text(40), options=many(text(12), 4, 4), answer=whole(0, 3)), 2, 1)),
    "plan": record(goal=text(40), steps=many(record(id=whole(1, 9), what=text(30), after=many(whole(1, 9), 2)), 3, 1)),
    "summary": record(title=text(30), bullets=many(text(40), 3, 3), keywords=many(text(12), 4)),
    "story": record(title=text(24), characters=many(record(name=text(10), traits=many(text(10), 2)), 2), ending=one("happy", "sad", "open")),
    "thoughts": record(thoughts=many(record(explanation=text(60), output=text(24)), 2, 1), final_answer=text(24)),
    "review": record(file=text(16), findings=many(record(line=whole(1, 999), severity=one("nit", "bug"), text=text(40)), 2), approve=FLAG),
    "timetable": record(**{day: many(text(10), 2) for day in ("monday", "tuesday", "wednesday", "thursday", "friday")}),
    "inventory": {"type": "array", "items": record(name=text(10), count=whole(0, 99), tags=many(text(8), 2)), "minItems": 2, "maxItems": 2},
    "chart": record(kind=one("bar", "line", "pie"), series=many(record(name=text(8), data=many(number(0, 100), 3)), 2, 1), legend=FLAG),
    "form": record(fields=many(record(name=pattern("^[a-z]{1,8}$"), type=one("text", "number", "date"), required=FLAG), 3, 1)),
    "dialogue": record(turns=many(record(speaker=one("A", "B"), line=text(40)), 3, 2)),
    "weather_report": record(city=text(12), days=many(record(date=DATE, high=whole(-30, 50), low=whole(-30, 50), sky=one("sunny", "cloudy", "rain")), 3, 2)),
    "character": record(name=text(12), level=whole(1, 20), stats=record(strength=whole(1, 20), wisdom=whole(1, 20), charm=whole(1, 20)), inventory=many(text(12), 3)),
    "unicode": record(größe=whole(0, 9), **{"naïve key": text(6), "emoji 🦊": FLAG, 'quo"te': NULL}),
}
