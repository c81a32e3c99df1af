package testbed

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	signer "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// What the servers of Amazon's protocols have in common.

// The credentials of servers that are started here.
const (
	awsID     = "id"
	awsSecret = "secret"
	awsRegion = "us-east-1"
)

// withCredentials is the URL of the service at addr, with credentials for those who sign.
func withCredentials(addr string) string {
	return (&url.URL{Scheme: "http", User: url.UserPassword(awsID, awsSecret), Host: addr}).String()
}

// askAWS sends a signed request to the service at u once, by a connection of its own, and returns the answer's body, and what
// the service calls itself, which is its version for want of a better one. The request is signed here, with what the SDK is made of:
// the SDK's clients are most of what a program with them compiles.
func askAWS(ctx context.Context, u *url.URL, service, method, body string, header http.Header) (status int, answer, version string, err error) {
	at := &url.URL{Scheme: u.Scheme, Host: u.Host, Path: "/"}
	req, err := http.NewRequestWithContext(ctx, method, at.String(), strings.NewReader(body))
	if err != nil {
		return 0, "", "", err
	}
	maps.Copy(req.Header, header)
	secret, _ := u.User.Password()
	as := aws.Credentials{AccessKeyID: u.User.Username(), SecretAccessKey: secret, SessionToken: os.Getenv("AWS_SESSION_TOKEN")}
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(body)))
	req.Header.Set("X-Amz-Content-Sha256", sum)
	region := cmp.Or(os.Getenv("AWS_REGION"), awsRegion)
	if err := signer.NewSigner().SignHTTP(ctx, as, req, sum, service, region, time.Now()); err != nil {
		return 0, "", "", err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return 0, "", "", err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(text), cmp.Or(resp.Header.Get("Server"), "of unknown version"), err
}

// findExternalAWS takes a list of host:port or of URLs, with credentials, or else those of the environment.
func findExternalAWS(ctx context.Context, k *kind, set string, ready func(ctx context.Context, u *url.URL) (string, error)) ([]*Server, error) {
	var found []*Server
	for text := range strings.SplitSeq(set, ",") {
		if !strings.Contains(text, "://") {
			text = "http://" + text
		}
		// Errors of a parser may quote the URL, and with it a secret.
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			return nil, fmt.Errorf("%s is neither host:port nor an http:// or https:// URL of a service", k.envAddr())
		}
		u.Path = ""
		if u.User == nil {
			u.User = url.UserPassword(cmp.Or(os.Getenv("AWS_ACCESS_KEY_ID"), awsID), cmp.Or(os.Getenv("AWS_SECRET_ACCESS_KEY"), awsSecret))
		}
		version, err := ready(ctx, u)
		if err != nil {
			return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", u.Host, k.envAddr(), err)
		}
		addr := u.Host
		if u.Port() == "" {
			addr += map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
		}
		found = append(found, &Server{Addr: addr, URL: u.String(), Version: version})
	}
	return found, nil
}
