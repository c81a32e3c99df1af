package reports_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestExamples keeps the snippets of the README's "Use it in your service" what compiles, and short.
func TestExamples(t *testing.T) {
	for _, dir := range []string{"resource", "resource/pgstore", "resource/s3store", "resource/dynamostore", "resource/redisstore"} {
		body := bodyOf(t, "../"+dir+"/example_test.go", "bill")
		require.LessOrEqual(t, strings.Count(body, "\n"), 10, "%s: lines", dir)
		region(t, readme, "example: "+dir, "```go\n"+body+"```\n")
	}
}

// bodyOf returns the lines of a function's body, moved to the left.
func bodyOf(t *testing.T, file, name string) string {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, source, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, d := range parsed.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == name {
			body := string(source[fset.Position(f.Body.Lbrace).Offset+1 : fset.Position(f.Body.Rbrace).Offset])
			return strings.ReplaceAll(strings.TrimPrefix(body, "\n"), "\n\t", "\n")[1:]
		}
	}
	require.Fail(t, "there is no such function", "%s in %s", name, file)
	return ""
}
