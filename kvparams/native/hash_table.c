/* The hash table of the prefix index; see kvparams/index/hash_table.py.
 *
 * Every number that is read from an array is checked before it is used as a position. */
#include "native.h"

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum { TOGETHER = 16 }; /* hashes whose memory is fetched at the same time */

typedef struct {
    Words arrays[3], given[2];
    int array_count, given_count;
    const uint64_t *hashes;
    uint32_t *heads, *next;
    uint32_t nodes; /* and the entry of number 0 */
    uint64_t base, buckets;
} Table;

static uint64_t home_of(const Table *table, uint64_t hash) {
    uint64_t home = hash * UINT64_C(0x9E3779B97F4A7C15) >> 32 & (2 * table->base - 1);
    return home >= table->buckets ? home - table->base : home;
}

static void close_table(Table *table) {
    while (table->array_count > 0)
        PyBuffer_Release(&table->arrays[--table->array_count].view);
    while (table->given_count > 0)
        PyBuffer_Release(&table->given[--table->given_count].view);
}

static bool give_words(Table *table, PyObject *object, Py_ssize_t width, bool writable) {
    if (!get_words(object, width, writable, &table->given[table->given_count]))
        return false;
    table->given_count++;
    return true;
}

/* Reads `(hashes, heads, next)` and the two numbers behind it. Returns false with an exception set; the caller closes
 * the table in any case. */
static bool open_table(Table *table, PyObject *const *args) {
    table->array_count = table->given_count = 0;
    if (!PyTuple_CheckExact(args[0]) || PyTuple_Size(args[0]) != 3) {
        PyErr_SetString(PyExc_TypeError, "a table is a tuple of three arrays");
        return false;
    }
    for (int i = 0; i < 3; i++, table->array_count++)
        if (!get_words(PyTuple_GetItem(args[0], i), i == 0 ? 8 : 4, i > 0, &table->arrays[i]))
            return false;
    table->hashes = table->arrays[0].view.buf;
    table->heads = table->arrays[1].view.buf;
    table->next = table->arrays[2].view.buf;
    table->base = PyLong_AsUnsignedLongLong(args[1]);
    table->buckets = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return false;
    Py_ssize_t nodes = table->arrays[0].count, buckets = table->arrays[1].count;
    if (nodes > 0 && nodes < UINT32_MAX && table->arrays[2].count == nodes && table->base > 0 &&
        table->base <= table->buckets && table->buckets <= 2 * table->base && table->buckets <= (uint64_t)buckets) {
        table->nodes = (uint32_t)nodes;
        return true;
    }
    PyErr_SetString(PyExc_ValueError, "the arrays of a table do not fit together");
    return false;
}

static uint32_t valid(const Table *table, uint32_t number) { return number < table->nodes ? number : 0; }

static uint32_t find(const Table *table, uint64_t hash) {
    uint32_t number = valid(table, table->heads[home_of(table, hash)]);
    while (number != 0 && table->hashes[number] != hash)
        number = valid(table, table->next[number]);
    return number;
}

static bool follows(const Table *table, uint32_t number, uint64_t hash) {
    return number != 0 && number + 1 < table->nodes && table->hashes[number + 1] == hash && hash != 0;
}

static void find_some(const Table *table, const uint64_t *hashes, Py_ssize_t count, uint32_t *to) {
    for (Py_ssize_t i = 0; i < count; i++)
        PREFETCH(&table->heads[home_of(table, hashes[i])]);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t number = valid(table, table->heads[home_of(table, hashes[i])]);
        PREFETCH(&table->hashes[number]);
        PREFETCH(&table->next[number]);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = find(table, hashes[i]);
}

/* find_nodes(table, base, buckets, hashes, numbers) -> None */
PyObject *find_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Table table;
    (void)module;
    if (!has_arguments(count, 5))
        return NULL;
    if (open_table(&table, args) && give_words(&table, args[3], 8, false) && give_words(&table, args[4], 4, true)) {
        const uint64_t *hashes = table.given[0].view.buf;
        uint32_t *to = table.given[1].view.buf, last = 0;
        Py_ssize_t end = table.given[0].count < table.given[1].count ? table.given[0].count : table.given[1].count;
        for (Py_ssize_t i = 0; i < end;) {
            if (follows(&table, last, hashes[i])) {
                to[i++] = ++last;
                continue;
            }
            Py_ssize_t some = end - i < TOGETHER ? end - i : TOGETHER;
            find_some(&table, hashes + i, some, to + i);
            i += some;
            last = to[i - 1];
        }
    }
    close_table(&table);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static bool append_run(PyObject *runs, Py_ssize_t end, uint32_t set) {
    PyObject *run = Py_BuildValue("nk", end, (unsigned long)set);
    bool done = run != NULL && PyList_Append(runs, run) == 0;
    Py_XDECREF(run);
    return done;
}

/* find_runs(table, base, buckets, hashes, sets) -> [(end, set), ...] */
PyObject *find_runs(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Table table;
    PyObject *runs = NULL;
    (void)module;
    if (!has_arguments(count, 5))
        return NULL;
    if (open_table(&table, args) && give_words(&table, args[3], 8, false) && give_words(&table, args[4], 4, false) &&
        (runs = PyList_New(0)) != NULL) {
        const uint64_t *hashes = table.given[0].view.buf;
        const uint32_t *sets = table.given[1].view.buf;
        uint32_t number = 0, set = 0;
        Py_ssize_t i;
        for (i = 0; i < table.given[0].count; i++) {
            number = follows(&table, number, hashes[i]) ? number + 1 : find(&table, hashes[i]);
            if (number == 0 || number >= table.given[1].count)
                break;
            if (i > 0 && sets[number] != set && !append_run(runs, i, set))
                break;
            set = sets[number];
        }
        if (i > 0 && !PyErr_Occurred())
            append_run(runs, i, set);
    }
    close_table(&table);
    if (!PyErr_Occurred())
        return runs;
    Py_XDECREF(runs);
    return NULL;
}

static void link_node(Table *table, uint32_t number) {
    uint64_t home = home_of(table, table->hashes[number]);
    table->next[number] = table->heads[home];
    table->heads[home] = number;
}

static void unlink_node(Table *table, uint32_t number) {
    uint32_t *place = &table->heads[home_of(table, table->hashes[number])];
    while (valid(table, *place) != 0 && *place != number)
        place = &table->next[*place];
    if (*place == number)
        *place = table->next[number];
}

static PyObject *change_nodes(PyObject *const *args, Py_ssize_t count, void (*change)(Table *, uint32_t)) {
    Table table;
    if (!has_arguments(count, 4))
        return NULL;
    if (open_table(&table, args) && give_words(&table, args[3], 4, false)) {
        const uint32_t *numbers = table.given[0].view.buf;
        for (Py_ssize_t i = 0; i < table.given[0].count; i++)
            if (valid(&table, numbers[i]) != 0)
                change(&table, numbers[i]);
    }
    close_table(&table);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* link_nodes(table, base, buckets, numbers) -> None */
PyObject *link_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    return change_nodes(args, count, link_node);
}

/* unlink_nodes(table, base, buckets, numbers) -> None */
PyObject *unlink_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    return change_nodes(args, count, unlink_node);
}

/* split_buckets(table, base, buckets, first) -> None */
PyObject *split_buckets(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Table table;
    (void)module;
    if (!has_arguments(count, 4))
        return NULL;
    if (open_table(&table, args)) {
        uint64_t bucket = PyLong_AsUnsignedLongLong(args[3]);
        for (; !PyErr_Occurred() && bucket >= table.base && bucket < table.buckets; bucket++) {
            if (bucket + TOGETHER < table.buckets) {
                uint32_t soon = valid(&table, table.heads[bucket + TOGETHER - table.base]);
                PREFETCH(&table.hashes[soon]);
                PREFETCH(&table.next[soon]);
            }
            uint32_t number = valid(&table, table.heads[bucket - table.base]);
            table.heads[bucket - table.base] = 0;
            while (number != 0) {
                uint32_t next = valid(&table, table.next[number]);
                link_node(&table, number);
                number = next;
            }
        }
    }
    close_table(&table);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
