package testbed

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
)

const (
	awsID     = "id"
	awsSecret = "secret"
	awsRegion = "us-east-1"
	awsURL    = "http://" + awsID + ":" + awsSecret + "@%s"
)

var awsSchemes = []string{"http", "https"}

func acceptAWS(u *url.URL, bare bool) bool {
	if bare || u.User == nil {
		u.User = url.UserPassword(cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), awsID), cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), awsSecret))
	}
	root := strings.Trim(u.Path, "/") == ""
	u.Path = ""
	return root
}

// readyAWS sends any request: only an SDK could sign one. The version is the server's name.
func readyAWS(ctx context.Context, _, at string, _ bool) (version string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return "", err
	}
	req.URL.User = nil
	resp, body, err := request(req) //nolint:bodyclose // request has read and closed it
	if err == nil && resp.StatusCode >= http.StatusInternalServerError {
		err = fmt.Errorf("%s: %.300s", resp.Status, body)
	}
	if err != nil {
		return "", err
	}
	return cmp.Or(resp.Header.Get("Server"), "of unknown version"), nil
}
