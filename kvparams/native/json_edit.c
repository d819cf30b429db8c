/* Changes members of a JSON object in its text. */
#include "native.h"

enum { MAX_CHANGES = 64 };

typedef struct {
    Py_ssize_t from, to;
    Slice text;
} Cut;

typedef struct {
    Slice name, text;
} Added;

static Slice slice_of(PyObject *bytes) { return (Slice){PyBytes_AsString(bytes), PyBytes_Size(bytes)}; }

static void insert_sorted(Cut *cuts, int count, Cut cut) {
    while (count > 0 && cuts[count - 1].from > cut.from) {
        cuts[count] = cuts[count - 1];
        count--;
    }
    cuts[count] = cut;
}

static char *put(char *to, const char *from, Py_ssize_t size) {
    memcpy(to, from, (size_t)size);
    return to + size;
}

/* edit_members(raw: bytes, spans: dict, changes: dict) -> bytes | None
 *
 * As `kvparams.jsontext.editing.edit`. None where a member is to be removed, or there are many changes. */
PyObject *edit_members(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Cut cuts[MAX_CHANGES];
    Added added[MAX_CHANGES];
    int cut_count = 0, added_count = 0;
    Slice raw;
    PyObject *name, *text;
    Py_ssize_t position = 0;
    (void)module;
    if (!has_arguments(count, 3))
        return NULL;
    if (!PyBytes_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) || !PyDict_CheckExact(args[2]))
        Py_RETURN_NONE;
    raw = slice_of(args[0]);
    const char *close = raw.at + raw.size;
    while (close > raw.at && close[-1] != '}')
        close--;
    if (close == raw.at)
        Py_RETURN_NONE;
    Py_ssize_t last = close - 1 - raw.at, size = raw.size - (raw.at + raw.size - close);
    while (PyDict_Next(args[2], &position, &name, &text)) {
        PyObject *span = PyDict_GetItemWithError(args[1], name);
        if (span == NULL && PyErr_Occurred())
            return NULL;
        if (text == Py_None) {
            if (span == NULL)
                continue;
            Py_RETURN_NONE;
        }
        if (cut_count == MAX_CHANGES || added_count == MAX_CHANGES || !PyBytes_CheckExact(text))
            Py_RETURN_NONE;
        Slice value = slice_of(text);
        if (span != NULL) {
            if (!PyTuple_Check(span) || PyTuple_Size(span) != 3)
                Py_RETURN_NONE;
            Cut cut = {PyLong_AsSsize_t(PyTuple_GetItem(span, 1)), PyLong_AsSsize_t(PyTuple_GetItem(span, 2)), value};
            if (PyErr_Occurred())
                return NULL;
            if (cut.from < 0 || cut.to < cut.from || cut.to > last)
                Py_RETURN_NONE;
            insert_sorted(cuts, cut_count++, cut);
            size += value.size - (cut.to - cut.from);
        } else {
            Added member = {{NULL, 0}, value};
            member.name.at = PyUnicode_AsUTF8AndSize(name, &member.name.size);
            if (member.name.at == NULL)
                return NULL;
            size += member.name.size + value.size + 3;
            if (added_count > 0 || PyDict_Size(args[1]) > 0)
                size++;
            added[added_count++] = member;
        }
    }
    if (cut_count == 0 && added_count == 0)
        return Py_NewRef(args[0]);
    Py_ssize_t at = 0;
    for (int i = 0; i < cut_count; i++) {
        if (cuts[i].from < at)
            Py_RETURN_NONE;
        at = cuts[i].to;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, size);
    if (made == NULL)
        return NULL;
    char *to = PyBytes_AsString(made);
    at = 0;
    for (int i = 0; i < cut_count; i++) {
        to = put(to, raw.at + at, cuts[i].from - at);
        to = put(to, cuts[i].text.at, cuts[i].text.size);
        at = cuts[i].to;
    }
    to = put(to, raw.at + at, last - at);
    for (int i = 0; i < added_count; i++) {
        if (i > 0 || PyDict_Size(args[1]) > 0)
            *to++ = ',';
        *to++ = '"';
        to = put(to, added[i].name.at, added[i].name.size);
        *to++ = '"';
        *to++ = ':';
        to = put(to, added[i].text.at, added[i].text.size);
    }
    *to++ = '}';
    return made;
}
