package site

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"
)

//go:embed page.html.tmpl
var pageSource string

//go:embed site.css
var styles string

var page = template.Must(template.New("page").Parse(pageSource))

var markdown = goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithParserOptions(parser.WithAutoHeadingID()))

// HTML returns a static site of the results: an index, a page for each, and the files that pages link to.
func HTML(results fs.FS) (Files, error) {
	out := Files{}
	pages, err := fs.Glob(results, "*/README.md")
	if err != nil {
		return nil, err
	}
	for _, name := range append([]string{"README.md"}, pages...) {
		b, err := fs.ReadFile(results, name)
		if err != nil {
			return nil, err
		}
		if err := render(results, name, b, out); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return out, nil
}

func render(results fs.FS, name string, source []byte, out Files) error {
	dir := path.Dir(name)
	doc := markdown.Parser().Parse(text.NewReader(source))
	err := ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		link, ok := n.(*ast.Link)
		if !ok || !entering {
			return ast.WalkContinue, nil
		}
		to, file, err := target(results, dir, string(link.Destination))
		link.Destination = []byte(to)
		if err == nil && file != "" {
			out[file], err = fs.ReadFile(results, file)
		}
		return ast.WalkContinue, err
	})
	if err != nil {
		return err
	}
	var body bytes.Buffer
	if err := markdown.Renderer().Render(&body, source, doc); err != nil {
		return err
	}
	var missing error
	text := image.ReplaceAllStringFunc(body.String(), func(img string) string {
		m := image.FindStringSubmatch(img)
		svg, err := fs.ReadFile(results, path.Join(dir, m[1]))
		missing = errors.Join(missing, err)
		return "<figure>" + string(svg) + "</figure>"
	})
	if missing != nil {
		return missing
	}
	text = paragraph.ReplaceAllString(text, `<div class="charts">$1</div>`)
	text = strings.ReplaceAll(strings.ReplaceAll(text, "<table>", `<div class="scroll" tabindex="0" role="region" aria-label="table"><table>`), "</table>", "</table></div>")
	text = figure.ReplaceAllString(text, `<td class="num">$1</td>`)
	text = mark.ReplaceAllStringFunc(text, func(m string) string { return `<span class="` + marks[m] + `">` + m + "</span>" })
	const timeline = "timeline.html"
	drawn, err := fs.ReadFile(results, path.Join(dir, timeline))
	switch {
	case err == nil:
		out[path.Join(dir, timeline)] = drawn
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	title := heading.FindSubmatch(source)
	if title == nil {
		return errors.New("it has no heading")
	}
	var b bytes.Buffer
	if err := page.Execute(&b, map[string]any{
		"Title": string(title[1]), "Style": template.CSS(styles), "Body": template.HTML(text), "Home": dir != ".", "Timeline": drawn != nil,
	}); err != nil {
		return err
	}
	out[path.Join(dir, "index.html")] = b.Bytes()
	return nil
}

// The colours of signs in tables.
var marks = map[string]string{"✕": "bad", "✗": "bad", "✓!": "doubt", "✓": "good"}

var (
	mark      = regexp.MustCompile("[✕✗]|✓!?")
	heading   = regexp.MustCompile(`(?m)^# (.*)$`)
	image     = regexp.MustCompile(`<img src="([a-z0-9-]+\.svg)" alt="[^"]*" ?/?>`)
	paragraph = regexp.MustCompile(`(?s)<p>((?:\s*<figure>.*?</figure>)+\s*)</p>`)
	figure    = regexp.MustCompile(`<td>((?:&gt; )?[\d.,]+(?: ?(?:%|/s|ms|s|µs|[kMG]B))?|—|·)</td>`)
)

// target resolves a link: to the index.html of a folder, or to a file that must be part of the site.
func target(results fs.FS, dir, link string) (to, file string, err error) {
	u, err := url.Parse(link)
	if err != nil {
		return "", "", err
	}
	if u.IsAbs() || u.Path == "" {
		return link, "", nil
	}
	p := path.Join(dir, u.Path)
	info, err := fs.Stat(results, p)
	switch {
	case err != nil:
		return "", "", fmt.Errorf("it links to what isn't in the results: %w", err)
	case info.IsDir():
		u.Path = path.Join(u.Path, "index.html")
		return u.String(), "", nil
	case path.Base(p) == "README.md":
		u.Path = path.Join(path.Dir(u.Path), "index.html")
		return u.String(), "", nil
	default:
		return link, p, nil
	}
}
