/* Reads heads of HTTP/1.1 messages of the ordinary form. RFC 9110 and RFC 9112. */
#include "native.h"

enum { MAX_HEADERS = 64, MAX_NAME = 64, MAX_HEAD = 64 << 10, MAX_DIGITS = 9 };

typedef struct {
    const char *at, *end;
} Reader;

typedef struct {
    Slice name, value; /* the name as it came */
} Header;

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool is_one_of(char c, const char *characters) { return c != 0 && strchr(characters, c) != NULL; }

static bool is_text(Slice text, const char *lower) {
    Py_ssize_t size = (Py_ssize_t)strlen(lower);
    if (text.size != size)
        return false;
    for (Py_ssize_t i = 0; i < size; i++)
        if ((char)(text.at[i] | (is_letter(text.at[i]) ? 0x20 : 0)) != lower[i])
            return false;
    return true;
}

static bool skip(Reader *reader, const char *text) {
    size_t size = strlen(text);
    if ((size_t)(reader->end - reader->at) < size || memcmp(reader->at, text, size) != 0)
        return false;
    reader->at += size;
    return true;
}

/* Reads one header line. Returns false for one that is not ordinary. */
static bool read_header(Reader *reader, Header *header) {
    header->name.at = reader->at;
    while (reader->at < reader->end &&
           (is_letter(*reader->at) || is_digit(*reader->at) || is_one_of(*reader->at, "-_")))
        reader->at++;
    header->name.size = reader->at - header->name.at;
    if (header->name.size == 0 || header->name.size > MAX_NAME || !skip(reader, ":"))
        return false;
    if (reader->at < reader->end && *reader->at == ' ')
        reader->at++;
    header->value.at = reader->at;
    while (reader->at < reader->end && *reader->at >= 0x20 && *reader->at != 0x7f)
        reader->at++;
    header->value.size = reader->at - header->value.at;
    if (header->value.size == 0 || header->value.at[0] == ' ' || header->value.at[header->value.size - 1] == ' ')
        return false;
    return skip(reader, "\r\n");
}

/* Returns the number in a Content-Length, or -1. */
static Py_ssize_t read_length(Slice text) {
    Py_ssize_t length = 0;
    if (text.size > MAX_DIGITS)
        return -1;
    for (Py_ssize_t i = 0; i < text.size; i++) {
        if (!is_digit(text.at[i]))
            return -1;
        length = length * 10 + (text.at[i] - '0');
    }
    return length;
}

static bool is_host(Slice host) {
    Py_ssize_t i = 0;
    while (i < host.size && (is_letter(host.at[i]) || is_digit(host.at[i]) || is_one_of(host.at[i], ".-_")))
        i++;
    if (i == 0)
        return false;
    if (i < host.size && host.at[i] == ':')
        for (i++; i < host.size && is_digit(host.at[i]); i++)
            ;
    return i == host.size;
}

static PyObject *lower_bytes(Slice text) {
    char lower[MAX_NAME];
    for (Py_ssize_t i = 0; i < text.size; i++)
        lower[i] = (char)(text.at[i] | (is_letter(text.at[i]) ? 0x20 : 0));
    return PyBytes_FromStringAndSize(lower, text.size);
}

static PyObject *as_bytes(Slice text) { return PyBytes_FromStringAndSize(text.at, text.size); }

/* Returns a list of pairs of bytes, names in lower case. */
static PyObject *header_list(const Header *headers, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *pair = Py_BuildValue("(NN)", lower_bytes(headers[i].name), as_bytes(headers[i].value));
        if (pair == NULL || PyList_SetItem(list, i, pair) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static bool read_start(PyObject *data, PyObject *at, Reader *reader) {
    char *raw;
    Py_ssize_t size, start = PyLong_AsSsize_t(at);
    if ((start == -1 && PyErr_Occurred()) || PyBytes_AsStringAndSize(data, &raw, &size) < 0)
        return false;
    if (start < 0 || start > size) {
        PyErr_SetString(PyExc_ValueError, "the position is not in the data");
        return false;
    }
    reader->at = raw + start;
    reader->end = raw + (size - start > MAX_HEAD ? start + MAX_HEAD : size);
    return true;
}

/* request_head(data: bytes, at: int) -> tuple[int, bytes, bytes, list[tuple[bytes, bytes]], int] | None
 *
 * The position behind the head, method, target, headers with names in lower case, Content-Length (0 without one). None
 * where the head is not whole or not ordinary: another version or method, a coding, an expectation, an upgrade, a
 * connection that is to be closed, anything that could be read in two ways. */
PyObject *request_head(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Reader reader;
    Header headers[MAX_HEADERS];
    int number = 0, hosts = 0, lengths = 0;
    Py_ssize_t length = 0;
    (void)module;
    if (!has_arguments(count, 2) || !read_start(args[0], args[1], &reader))
        return NULL;
    char *raw = PyBytes_AsString(args[0]);
    Slice method = {reader.at, 0};
    if (skip(&reader, "POST "))
        method.size = 4;
    else if (skip(&reader, "GET "))
        method.size = 3;
    else
        Py_RETURN_NONE;
    Slice target = {reader.at, 0};
    if (reader.at >= reader.end || *reader.at != '/')
        Py_RETURN_NONE;
    while (reader.at < reader.end &&
           (is_letter(*reader.at) || is_digit(*reader.at) || is_one_of(*reader.at, "/-._~%?&=:@!$'()*+,;")))
        reader.at++;
    target.size = reader.at - target.at;
    if (!skip(&reader, " HTTP/1.1\r\n"))
        Py_RETURN_NONE;
    while (!skip(&reader, "\r\n")) {
        if (number == MAX_HEADERS || !read_header(&reader, &headers[number]))
            Py_RETURN_NONE;
        Slice name = headers[number].name, value = headers[number].value;
        number++;
        switch (name.at[0] | 0x20) { /* few names begin so */
        case 'h':
            if (is_text(name, "host") && (++hosts > 1 || !is_host(value)))
                Py_RETURN_NONE;
            break;
        case 'c':
            if (is_text(name, "content-length") && (++lengths > 1 || (length = read_length(value)) < 0))
                Py_RETURN_NONE;
            if (is_text(name, "connection") && !is_text(value, "keep-alive"))
                Py_RETURN_NONE;
            break;
        case 't':
            if (is_text(name, "transfer-encoding"))
                Py_RETURN_NONE;
            break;
        case 'e':
            if (is_text(name, "expect"))
                Py_RETURN_NONE;
            break;
        case 'u':
            if (is_text(name, "upgrade"))
                Py_RETURN_NONE;
            break;
        case 'p':
            if (is_text(name, "proxy-connection"))
                Py_RETURN_NONE;
            break;
        }
    }
    if (hosts != 1)
        Py_RETURN_NONE;
    return Py_BuildValue("(nNNNn)", (Py_ssize_t)(reader.at - raw), as_bytes(method), as_bytes(target),
                         header_list(headers, number), length);
}

/* response_head(data: bytes) -> tuple[int, int, bytes, bytes, int] | None
 *
 * The position behind the head, status, Content-Type and Retry-After (empty without one), Content-Length or -1 for
 * chunks. None where the head is not whole or not ordinary: a status without a body, two framings or none, a connection
 * that is to be closed. */
PyObject *response_head(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Reader reader;
    Header header;
    Slice type = {NULL, 0}, retry = {NULL, 0};
    int number = 0;
    bool framed = false;
    Py_ssize_t length = -1;
    (void)module;
    PyObject *zero = PyLong_FromLong(0);
    bool good = zero != NULL && has_arguments(count, 1) && read_start(args[0], zero, &reader);
    Py_XDECREF(zero);
    if (!good)
        return NULL;
    char *raw = PyBytes_AsString(args[0]);
    if (!skip(&reader, "HTTP/1.1 ") || reader.end - reader.at < 4)
        Py_RETURN_NONE;
    if (!is_digit(reader.at[0]) || !is_digit(reader.at[1]) || !is_digit(reader.at[2]) || reader.at[3] != ' ')
        Py_RETURN_NONE;
    int status = (reader.at[0] - '0') * 100 + (reader.at[1] - '0') * 10 + (reader.at[2] - '0');
    if (status < 200 || status > 599 || status == 204 || status == 304)
        Py_RETURN_NONE;
    for (reader.at += 4; reader.at < reader.end && *reader.at >= 0x20 && *reader.at != 0x7f; reader.at++)
        ;
    if (!skip(&reader, "\r\n"))
        Py_RETURN_NONE;
    while (!skip(&reader, "\r\n")) {
        if (number++ == MAX_HEADERS || !read_header(&reader, &header))
            Py_RETURN_NONE;
        switch (header.name.at[0] | 0x20) {
        case 'c':
            if (is_text(header.name, "content-length")) {
                length = read_length(header.value);
                if (framed || length < 0)
                    Py_RETURN_NONE;
                framed = true;
            } else if (is_text(header.name, "content-type")) {
                if (type.at != NULL)
                    Py_RETURN_NONE;
                type = header.value;
            } else if (is_text(header.name, "connection") && !is_text(header.value, "keep-alive"))
                Py_RETURN_NONE;
            break;
        case 't':
            if (is_text(header.name, "transfer-encoding")) {
                if (framed || !is_text(header.value, "chunked"))
                    Py_RETURN_NONE;
                framed = true;
            }
            break;
        case 'r':
            if (is_text(header.name, "retry-after")) {
                if (retry.at != NULL)
                    Py_RETURN_NONE;
                retry = header.value;
            }
            break;
        case 'u':
            if (is_text(header.name, "upgrade"))
                Py_RETURN_NONE;
            break;
        case 'p':
            if (is_text(header.name, "proxy-connection"))
                Py_RETURN_NONE;
            break;
        }
    }
    if (!framed)
        Py_RETURN_NONE;
    return Py_BuildValue("(niy#y#n)", (Py_ssize_t)(reader.at - raw), status, type.at == NULL ? "" : type.at, type.size,
                         retry.at == NULL ? "" : retry.at, retry.size, length);
}
