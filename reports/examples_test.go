package reports_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"go/types"
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

// TestExamples: the README's snippets are tests that run, complete, and short.
func TestExamples(t *testing.T) {
	for _, s := range []struct {
		file      string
		functions []string
		lines     int
	}{
		{"dlock/redislock/example_test.go", []string{"open", "bill"}, 45},
	} {
		code := snippet(t, "../"+s.file, s.functions...)
		require.LessOrEqual(t, strings.Count(code, "\n"), s.lines, "%s: lines", s.file)
		region(t, readme, "example: "+s.file, "```go\n"+code+"```\n")
	}
}

// snippet returns functions behind their imports. With a package clause they compile.
func snippet(t *testing.T, file string, functions ...string) string {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, source, parser.ParseComments)
	require.NoError(t, err)
	var all []string
	for _, function := range functions {
		at := slices.IndexFunc(parsed.Decls, func(d ast.Decl) bool {
			f, ok := d.(*ast.FuncDecl)
			return ok && f.Recv == nil && f.Name.Name == function
		})
		require.GreaterOrEqual(t, at, 0, "%s has no function %s", file, function)
		f := parsed.Decls[at].(*ast.FuncDecl)
		all = append(all, string(source[fset.Position(f.Doc.Pos()).Offset:fset.Position(f.End()).Offset]))
	}
	body := strings.Join(all, "\n\n")

	// Undeclared package names must be imported. A name is the path's last element, less the version.
	alone, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+body, 0)
	require.NoError(t, err)
	missing := map[string]bool{}
	for _, id := range alone.Unresolved {
		missing[id.Name] = types.Universe.Lookup(id.Name) == nil
	}
	var groups [3][]string // as gci has them
	for _, spec := range parsed.Imports {
		require.Nil(t, spec.Name, "%s: an import that is renamed", file)
		quoted := spec.Path.Value
		of := regexp.MustCompile(`/v\d+$`).ReplaceAllString(strings.Trim(quoted, `"`), "")
		name := strings.TrimPrefix(of[strings.LastIndex(of, "/")+1:], "go-")
		if !missing[name] {
			continue
		}
		delete(missing, name)
		group := 0
		switch {
		case strings.HasPrefix(of, "github.com/fencelab/"):
			group = 2
		case strings.Contains(of, "."):
			group = 1
		}
		groups[group] = append(groups[group], "\t"+quoted+"\n")
	}
	for name, isMissing := range missing {
		require.False(t, isMissing, "%s: %v use %s, which is neither in them nor imported", file, functions, name)
	}
	var b bytes.Buffer
	b.WriteString("import (\n")
	sep := ""
	for _, g := range groups {
		if g != nil {
			fmt.Fprint(&b, sep, strings.Join(g, ""))
			sep = "\n"
		}
	}
	b.WriteString(")\n\n" + body + "\n")
	code, err := format.Source(append([]byte("package p\n\n"), b.Bytes()...))
	require.NoError(t, err)
	return strings.TrimPrefix(string(code), "package p\n\n")
}

// handWritten are pages that no other test reads, except results.
var handWritten = []string{
	readme, "../CONTRIBUTING.md", "../docs/design.md", "../docs/operations.md", "../docs/your-own-lock.md", "../cmd/README.md", "../scenarios/README.md",
}

var (
	identifier = regexp.MustCompile("`([a-z][a-z0-9]+)\\.([A-Z][A-Za-z]*)")
	link       = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	target     = regexp.MustCompile("(?m)(?:`|^)make ([a-z]+)")
)

// TestNames: identifiers, tests, files and make's targets on those pages exist.
func TestNames(t *testing.T) {
	dirs := map[string][]string{} // of packages, by name
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

// declares reports whether the package in dir declares an identifier.
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

// TestRecordedResults checks what the late write's page says of where it was recorded, except the machine.
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
