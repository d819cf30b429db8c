// JSON that is read without losing a byte: what is not changed stays as it was written.
package main

import (
	"encoding/json"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

const maxLevels = 256

type members map[string]string
type entry struct{ name, text, value string } // a member of an object or an item of a list, as it is written

var surrogate = regexp.MustCompile(`\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u[dD][89a-fA-F]\w\w`)
var errJSON = errors.New("JSON that two readers may read differently")

// entries splits the text of an object or a list; nil for any other value.
func entries(text string) (found []entry) {
	decoder := json.NewDecoder(strings.NewReader(text))
	if opening, _ := decoder.Token(); opening != json.Delim('{') && opening != json.Delim('[') {
		return nil
	}
	for decoder.More() {
		var value json.RawMessage
		one, from := entry{name: strconv.Itoa(len(found))}, decoder.InputOffset()
		if text[0] == '{' {
			name, _ := decoder.Token()
			one.name = name.(string)
		}
		decoder.Decode(&value)
		one.text, one.value = strings.TrimLeft(text[from:decoder.InputOffset()], ", \t\r\n"), string(value)
		found = append(found, one)
	}
	return found
}

// strict refuses what two readers may read differently.
func strict(text string, level int) error {
	if strings.ContainsAny(text[:1], "-0123456789") {
		if _, err := strconv.ParseFloat(text, 64); err != nil && strings.ContainsAny(text, ".eE") {
			return errJSON
		}
	}
	names := members{}
	for _, one := range entries(text) {
		if _, twice := names[one.name]; twice || level == maxLevels || strict(one.value, level+1) != nil {
			return errJSON
		}
		names[one.name] = ""
	}
	return nil
}

func parse(raw []byte) (string, error) {
	text := strings.Trim(string(raw), " \t\r\n")
	if !utf8.Valid(raw) || len(text) == 0 || text[0] != '{' || !json.Valid(raw) {
		return "", errJSON
	}
	for _, found := range surrogate.FindAllString(text, -1) {
		if len(found) == 6 {
			return "", errJSON
		}
	}
	return text, strict(text, 0)
}

func get(text string, names ...string) string { // "" if there is none
	for _, name := range names {
		found := ""
		for _, one := range entries(text) {
			if one.name == name && text[0] == '{' {
				found = one.value
			}
		}
		text = found
	}
	return text
}

func edit(text string, changes members) string { // "" removes a member
	kept := []string{}
	for _, one := range entries(text) {
		if _, changed := changes[one.name]; !changed {
			kept = append(kept, one.text)
		}
	}
	for name, value := range changes {
		if value != "" {
			kept = append(kept, quote(name)+":"+value)
		}
	}
	return "{" + strings.Join(kept, ",") + "}"
}

func without(text, path string) string {
	kept, same := []string{}, true
	for _, one := range entries(text) {
		_, listed := forbidden[one.name]
		_, place := places[path]
		if text[0] == '{' && (listed && (place || path == "") || path == ".nvext" && nvext.MatchString(one.name) || one.name == "uuid" && media.MatchString(path)) {
			same = false
			continue
		}
		inner := without(one.value, path+"."+one.name)
		same = same && inner == one.value
		kept = append(kept, strings.TrimSuffix(one.text, one.value)+inner)
	}
	if same {
		return text
	}
	return text[:1] + strings.Join(kept, ",") + text[len(text)-1:]
}

func quote(text string) string {
	made, _ := json.Marshal(text)
	return string(made)
}
