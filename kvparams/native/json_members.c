/* Finds where the members of a JSON object stand in its text. */
#include "native.h"

/* Bounds within which a text is ordinary; the pure code refuses or bounds what lies beyond them. */
enum {
    MAX_DEPTH = 32,
    MAX_KEYS = 32,        /* of one object: keys are compared pairwise */
    MAX_CONTAINERS = 2000,
    MAX_NUMBER = 300,     /* digits; a longer number may be too large for a double */
};

typedef struct {
    Slice keys[MAX_KEYS];
    int count;
    char closes;
} Container;

/* Returns the position behind the string whose opening quote is at `at`, or NULL. Sets `*escaped`. */
static const char *skip_string(const char *at, const char *end, bool *escaped) {
    const char *from = at + 1;
    *escaped = false;
    for (;;) {
        const char *quote = memchr(from, '"', (size_t)(end - from));
        if (quote == NULL)
            return NULL;
        const char *back = quote;
        while (back > from && back[-1] == '\\')
            back--;
        if (!*escaped && memchr(at + 1, '\\', (size_t)(quote - at - 1)) != NULL)
            *escaped = true;
        if ((quote - back) % 2 == 0)
            return quote + 1;
        from = quote + 1; /* an escaped quote */
        if (from >= end)
            return NULL;
    }
}

/* Returns the position behind a number or literal, or NULL for a number that may overflow. */
static const char *skip_scalar(const char *at, const char *end) {
    const char *start = at;
    bool number = *at == '-' || (*at >= '0' && *at <= '9');
    for (; at < end; at++) {
        char c = *at;
        if (c == ',' || c == '}' || c == ']' || c == ' ' || c == '\n' || c == '\r' || c == '\t')
            break;
        if (number && (c == 'e' || c == 'E'))
            return NULL;
    }
    return at - start > MAX_NUMBER || at == start ? NULL : at;
}

static bool add_key(Container *object, Slice key) {
    if (object->count == MAX_KEYS)
        return false;
    for (int i = 0; i < object->count; i++)
        if (object->keys[i].size == key.size && memcmp(object->keys[i].at, key.at, (size_t)key.size) == 0)
            return false;
    object->keys[object->count++] = key;
    return true;
}

/* Reads a key and the colon behind it. Returns the position of the value, or NULL. */
static const char *read_key(const char *at, const char *end, Slice *key) {
    bool escaped;
    if (at >= end || *at != '"')
        return NULL;
    const char *behind = skip_string(at, end, &escaped);
    if (behind == NULL || escaped)
        return NULL;
    key->at = at + 1;
    key->size = behind - at - 2;
    at = skip_space(behind, end);
    if (at >= end || *at != ':')
        return NULL;
    at = skip_space(at + 1, end);
    return at < end ? at : NULL;
}

/* Returns the position behind the object or list at `at`, or NULL for one that is not ordinary. */
static const char *skip_container(const char *at, const char *end, int max_depth, int *left) {
    Container stack[MAX_DEPTH];
    int depth = 0;
    bool escaped;
    for (;;) {
        /* a value begins at `at` */
        char c = *at;
        if (c == '{' || c == '[') {
            if (depth == max_depth || --*left < 0)
                return NULL;
            Container *inner = &stack[depth++];
            inner->count = 0;
            inner->closes = c == '{' ? '}' : ']';
            at = skip_space(at + 1, end);
            if (at >= end)
                return NULL;
            if (*at != inner->closes) {
                if (c == '{') {
                    Slice key;
                    at = read_key(at, end, &key);
                    if (at == NULL || !add_key(inner, key))
                        return NULL;
                }
                continue;
            }
        } else {
            at = c == '"' ? skip_string(at, end, &escaped) : skip_scalar(at, end);
            if (at == NULL)
                return NULL;
            at = skip_space(at, end);
        }
        /* behind a value, or at the end of an empty container */
        for (;;) {
            if (at >= end)
                return NULL;
            Container *outer = &stack[depth - 1];
            if (*at == ',') {
                at = skip_space(at + 1, end);
                if (at >= end)
                    return NULL;
                if (outer->closes == '}') {
                    Slice key;
                    at = read_key(at, end, &key);
                    if (at == NULL || !add_key(outer, key))
                        return NULL;
                }
                break;
            }
            if (*at != outer->closes)
                return NULL;
            at++;
            if (--depth == 0)
                return at;
            at = skip_space(at, end);
        }
    }
}

static PyObject *span(newfunc make, PyTypeObject *type, Py_ssize_t start, Py_ssize_t value, Py_ssize_t end) {
    PyObject *three = PyTuple_New(3), *arguments = PyTuple_New(1), *made = NULL;
    const Py_ssize_t positions[] = {start, value, end};
    bool good = three != NULL && arguments != NULL;
    for (Py_ssize_t i = 0; good && i < 3; i++) {
        PyObject *position = PyLong_FromSsize_t(positions[i]);
        good = position != NULL && PyTuple_SetItem(three, i, position) == 0;
    }
    if (good && PyTuple_SetItem(arguments, 0, Py_NewRef(three)) == 0)
        made = make(type, arguments, NULL);
    Py_XDECREF(arguments);
    Py_XDECREF(three);
    return made;
}

/* member_spans(raw: bytes, document: dict, span_type: type, max_depth: int) -> dict | None
 *
 * `raw` is what `document` was parsed from, so it is valid JSON. The result has the keys of `document`; each value is a
 * `span_type`, a subtype of tuple. None if a key stands twice anywhere, has an escape, or if anything is not ordinary. */
PyObject *member_spans(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!has_arguments(count, 4))
        return NULL;
    Py_ssize_t max_depth = PyLong_AsSsize_t(args[3]);
    if (max_depth == -1 && PyErr_Occurred())
        return NULL;
    if (!PyType_Check(args[2]) || !PyType_IsSubtype((PyTypeObject *)args[2], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "the third argument must be a subtype of tuple");
        return NULL;
    }
    if (!PyBytes_CheckExact(args[0]) || !PyDict_CheckExact(args[1]))
        Py_RETURN_NONE;
    const char *raw = PyBytes_AsString(args[0]);
    Py_ssize_t size = PyBytes_Size(args[0]);
    int inner_depth = max_depth - 1 > MAX_DEPTH ? MAX_DEPTH : (int)max_depth - 1;
    newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    const char *end = raw + size, *at = skip_space(raw, end);
    int left = MAX_CONTAINERS;
    PyObject *found = PyDict_New(), *key, *value;
    Py_ssize_t position = 0;
    if (found == NULL)
        return NULL;
    if (at >= end || *at != '{')
        goto not_ordinary;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}')
        goto closed;
    for (;;) {
        Slice name;
        const char *start = at;
        Py_ssize_t key_size;
        bool escaped;
        at = read_key(at, end, &name);
        if (at == NULL || !PyDict_Next(args[1], &position, &key, &value))
            goto not_ordinary;
        const char *known = PyUnicode_AsUTF8AndSize(key, &key_size);
        if (known == NULL)
            goto failed;
        if (key_size != name.size || memcmp(known, name.at, (size_t)key_size) != 0)
            goto not_ordinary; /* a key stands twice, or parser and scanner disagree */
        const char *begins = at;
        if (*at == '{' || *at == '[')
            at = inner_depth > 0 ? skip_container(at, end, inner_depth, &left) : NULL;
        else
            at = *at == '"' ? skip_string(at, end, &escaped) : skip_scalar(at, end);
        if (at == NULL)
            goto not_ordinary;
        PyObject *made = span(make, (PyTypeObject *)args[2], start - raw, begins - raw, at - raw);
        if (made == NULL)
            goto failed;
        int failed = PyDict_SetItem(found, key, made);
        Py_DECREF(made);
        if (failed < 0)
            goto failed;
        at = skip_space(at, end);
        if (at >= end)
            goto not_ordinary;
        if (*at == '}')
            break;
        if (*at != ',')
            goto not_ordinary;
        at = skip_space(at + 1, end);
    }
closed:
    if (PyDict_Next(args[1], &position, &key, &value) || skip_space(at + 1, end) != end)
        goto not_ordinary;
    return found;
not_ordinary:
    Py_DECREF(found);
    Py_RETURN_NONE;
failed:
    Py_DECREF(found);
    return NULL;
}

/* find_member(raw: bytes, name: str) -> tuple[int, int, int] | None
 *
 * Where the member of this name starts, where its value does, and where that ends, in the text of an object that is valid
 * JSON. None where there is no such member, or more than one, or anything is not ordinary. */
PyObject *find_member(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Slice name;
    (void)module;
    if (!has_arguments(count, 2))
        return NULL;
    name.at = PyUnicode_AsUTF8AndSize(args[1], &name.size);
    if (name.at == NULL)
        return NULL;
    if (!PyBytes_CheckExact(args[0]))
        Py_RETURN_NONE;
    const char *raw = PyBytes_AsString(args[0]), *end = raw + PyBytes_Size(args[0]), *at = skip_space(raw, end);
    Py_ssize_t found[3] = {-1, 0, 0};
    int left = MAX_CONTAINERS;
    if (at >= end || *at != '{')
        Py_RETURN_NONE;
    do { /* `at` is the brace, or the comma behind a member */
        Slice key;
        bool escaped;
        const char *start = skip_space(at + 1, end), *value = read_key(start, end, &key);
        if (value == NULL)
            Py_RETURN_NONE;
        if (*value == '{' || *value == '[')
            at = skip_container(value, end, MAX_DEPTH, &left);
        else
            at = *value == '"' ? skip_string(value, end, &escaped) : skip_scalar(value, end);
        if (at == NULL)
            Py_RETURN_NONE;
        if (key.size == name.size && memcmp(key.at, name.at, (size_t)key.size) == 0) {
            if (found[0] >= 0)
                Py_RETURN_NONE;
            found[0] = start - raw;
            found[1] = value - raw;
            found[2] = at - raw;
        }
        at = skip_space(at, end);
    } while (at < end && *at == ',');
    if (found[0] < 0 || at >= end || *at != '}')
        Py_RETURN_NONE;
    return Py_BuildValue("(nnn)", found[0], found[1], found[2]);
}
