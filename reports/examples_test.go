package reports_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The README's snippet is a test file that runs, without its Example function.
func TestExample(t *testing.T) {
	const file = "dlock/redislock/example_test.go"
	source, err := os.ReadFile("../" + file)
	require.NoError(t, err)
	_, code, _ := strings.Cut(string(source), "\n\n") // after the package clause
	code, _, _ = strings.Cut(code, "\n// The lock from the connection")
	for _, its := range []string{"log", "github.com/alicebob/miniredis/v2"} {
		code = strings.Replace(code, "\t\""+its+"\"\n", "", 1)
	}
	imported := regexp.MustCompile(`(?m)^\t"(?:.*?/)?(?:go-)?(\w+)(?:/v\d+)?"$`).FindAllStringSubmatch(code, -1)
	require.NotEmpty(t, imported)
	for _, m := range imported {
		require.Contains(t, code, m[1]+".", "an import of the Example alone")
	}
	require.LessOrEqual(t, strings.Count(code, "\n"), 45, "lines")
	region(t, readme, "example: "+file, "```go\n"+code+"```\n")
}

// handWritten are pages that no other test reads, except results.
var handWritten = []string{
	readme, "../CHANGELOG.md", "../CONTRIBUTING.md", "../SECURITY.md", "../docs/design.md", "../docs/glossary.md", "../docs/operations.md", "../docs/which-lock.md",
	"../docs/your-own-lock.md", "../cmd/README.md", "../scenarios/README.md", "results/README.md",
}

var (
	identifier = regexp.MustCompile("`([a-z][a-z0-9]+)\\.([A-Z][A-Za-z]*)")
	link       = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	target     = regexp.MustCompile("(?m)(?:`|^)make ([a-z]+)")
)

// TestNames: identifiers, tests, files and make's targets on those pages exist.
func TestNames(t *testing.T) {
	dirs := map[string][]string{}
	for _, root := range []string{"dlock", "resource", "scenarios", "faults"} {
		require.NoError(t, filepath.WalkDir("../"+root, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs[d.Name()] = append(dirs[d.Name()], p)
			}
			return err
		}))
	}
	makefile, err := os.ReadFile("../Makefile")
	require.NoError(t, err)
	checked := 0
	for _, page := range handWritten {
		b, err := os.ReadFile(page)
		require.NoError(t, err)
		text := string(b)
		for _, m := range identifier.FindAllStringSubmatch(text, -1) {
			if dirs[m[1]] == nil {
				continue // another module's
			}
			require.True(t, slices.ContainsFunc(dirs[m[1]], func(dir string) bool { return declares(t, dir, m[2]) }), "%s: %s.%s", page, m[1], m[2])
			checked++
		}
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(page), m[1]))
			require.NoError(t, err, page)
			checked++
		}
		for _, m := range target.FindAllStringSubmatch(text, -1) {
			require.True(t, strings.Contains(string(makefile), "\n"+m[1]+":"), "%s: make %s", page, m[1])
			checked++
		}
		for _, name := range command.FindAllString(text, -1) {
			if name != "TestMain" {
				requireTest(t, "", name)
				checked++
			}
		}
	}
	require.Greater(t, checked, 80, "names")
}

func declares(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(dir + "/*.go")
	require.NoError(t, err)
	for _, file := range files {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		if regexp.MustCompile(`(?m)^(?:func|type|var|const|\t)\s*` + name + `\b`).Match(b) {
			return true
		}
	}
	return false
}

// TestRecordedResults checks where the late write's page says that it was recorded, except the machine.
func TestRecordedResults(t *testing.T) {
	const dir = "results/late-write"
	var said []string
	for _, file := range histories(t)[dir] {
		first := recordedEvents(t, file)[0]
		said = append(said, fmt.Sprintf("Recorded %s on 2 cores shared with other work, with %s, a lease of %v and a freeze of %v.\n",
			first.Time.Format(time.DateOnly), first.Run.Server, time.Duration(first.Run.TTL), time.Duration(first.Run.Pause)))
	}
	require.Len(t, slices.Compact(said), 1)
	region(t, dir+"/README.md", "table: recorded", said[0])
}
