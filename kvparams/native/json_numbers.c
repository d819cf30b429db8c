/* Packs a list of whole numbers, such as token ids, without an object for each. */
#include "native.h"

/* Returns the position behind the first `"name"` in the text, or NULL. */
static const char *find_name(const char *at, const char *end, Slice name) {
    while ((at = memchr(at, '"', (size_t)(end - at))) != NULL) {
        at++;
        if (end - at <= name.size)
            return NULL;
        if (memcmp(at, name.at, (size_t)name.size) == 0 && at[name.size] == '"')
            return at + name.size + 1;
    }
    return NULL;
}

/* Reads one number. Returns the position behind it, or NULL for one that is not ordinary. */
static const char *read_number(const char *at, const char *end, uint32_t *number) {
    enum { MAX_DIGITS = 10 };
    const char *start = at;
    uint64_t value = 0;
    while (at < end && *at >= '0' && *at <= '9' && at - start <= MAX_DIGITS)
        value = value * 10 + (uint64_t)(*at++ - '0');
    if (at == start || value > UINT32_MAX || (*start == '0' && at - start > 1))
        return NULL;
    *number = (uint32_t)value;
    return at;
}

/* Packs the numbers between `at` and the bracket at `close`. Returns how many there are, or 0 for any other text. */
static Py_ssize_t pack_list(const char *at, const char *close, char *to) {
    for (Py_ssize_t count = 1;; count++, to += sizeof(uint32_t)) {
        uint32_t number;
        at = read_number(skip_space(at, close), close, &number);
        if (at == NULL)
            return 0;
        memcpy(to, &number, sizeof number);
        at = skip_space(at, close);
        if (at == close)
            return count;
        if (*at++ != ',')
            return 0;
    }
}

/* pack_numbers(raw: bytes, name: str) -> tuple[int, int, bytes] | None
 *
 * Where the first `"name"` stands that has a list of numbers from 0 to 2^32 - 1 behind it: the positions of the list and
 * of its end, and the numbers as unsigned 32-bit integers of this machine. None for any other value. */
PyObject *pack_numbers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Slice name;
    (void)module;
    if (!has_arguments(count, 2))
        return NULL;
    name.at = PyUnicode_AsUTF8AndSize(args[1], &name.size);
    if (name.at == NULL)
        return NULL;
    if (!PyBytes_CheckExact(args[0]))
        Py_RETURN_NONE;
    const char *raw = PyBytes_AsString(args[0]), *end = raw + PyBytes_Size(args[0]);
    const char *at = find_name(raw, end, name);
    if (at == NULL)
        Py_RETURN_NONE;
    at = skip_space(at, end);
    if (at == end || *at != ':')
        Py_RETURN_NONE;
    const char *open = skip_space(at + 1, end);
    const char *close = open < end && *open == '[' ? memchr(open, ']', (size_t)(end - open)) : NULL;
    if (close == NULL)
        Py_RETURN_NONE;
    char *numbers = PyMem_Malloc((size_t)(close - open) * 2 + sizeof(uint32_t)); /* a number and a comma: two bytes */
    if (numbers == NULL)
        return PyErr_NoMemory();
    Py_ssize_t number_count = pack_list(open + 1, close, numbers);
    PyObject *found = Py_None;
    if (number_count > 0)
        found = Py_BuildValue("(nny#)", open - raw, close + 1 - raw, numbers, number_count * (Py_ssize_t)sizeof(uint32_t));
    else
        Py_INCREF(found);
    PyMem_Free(numbers);
    return found;
}
