"""Formats of JSON Schema that the compiler does not know, or takes too loosely, as patterns and bounds."""

from __future__ import annotations

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # not 0000, which few calendars have
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_AND_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_OFFSET = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# A leap second is the last one of a day, which other offsets than UTC have at other hours.
_TIME = rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"

_H = "[0-9a-fA-F]{1,4}"  # RFC 3986, IPv6address
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LAST = rf"(?:{_H}:{_H}|{_BYTE}(?:\.{_BYTE}){{3}})"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{6}}{_LAST}",
        f"::(?:{_H}:){{5}}{_LAST}",
        *(f"(?:(?:{_H}:){{0,{before}}}{_H})?::(?:{_H}:){{{4 - before}}}{_LAST}" for before in range(5)),
        f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
        f"(?:(?:{_H}:){{0,6}}{_H})?::",
    ]
)

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "ipv6": f"^(?:{_IPV6})$",
    "json-pointer": "^(/([^~/]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$",
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
BOUNDS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}  # OpenAPI's
WITHOUT_EFFECT = ("float", "double", "password")  # OpenAPI's: every number, every text
